"""transformers 5.23.0: ``DistributedConfig(tp_size=N, enable_expert_parallel=True)`` is always refused.

The docstring says that it is the same as ``ep_size=tp_size, tp_plan={}``, and that an empty plan applies no rule of tensor
parallelism. Expected: a model whose experts are spread over N ranks, with a warning that the flag is deprecated. Seen:
``ValueError: `tp_size=2` was requested, but `Qwen3MoeForCausalLM` has no `tp_plan```, as for ``tp_plan={}`` itself.
"""

import os
import tempfile

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig


def rank(number: int, directory: str) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29626"}
    try:
        config = DistributedConfig(tp_size=2, enable_expert_parallel=True)
        Qwen3MoeForCausalLM.from_pretrained(directory, distributed_config=config)
        found = "loaded"
    except ValueError as error:
        found = str(error)
    if number == 0:
        print("SEEN" if "has no `tp_plan`" in found else "GONE", found)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sizes = {
        "hidden_size": 16,
        "moe_intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    with tempfile.TemporaryDirectory() as directory:
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig(vocab_size=32, num_hidden_layers=1, **sizes, **experts)
        ).save_pretrained(directory)
        torch.multiprocessing.spawn(rank, (directory,), 2)
