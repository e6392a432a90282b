"""DeepSpeed 0.19.8: after a training step under Ulysses a model with fewer heads of keys than ranks cannot be evaluated.

``UlyssesSPAttentionHF`` sets ``num_key_value_groups`` of the attention to what a rank has in training. With ``disable_in_eval``,
which accelerate passes, the whole heads of an evaluation are then not repeated. Expected: the logits of before. Seen:
``RuntimeError: The size of tensor a (4) must match the size of tensor b (2) at non-singleton dimension 1``.
"""

import os

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers import LlamaConfig, LlamaForCausalLM


def rank(number: int) -> None:
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "4",
        "LOCAL_SIZE": "4",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29627"}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 4, 1, disable_in_eval=True)
    tokens = torch.arange(8)[None]
    part = tokens.chunk(4, dim=1)[number].contiguous()
    model.train()(input_ids=part, position_ids=part)
    try:
        model.eval()(input_ids=tokens)
        found = "evaluated"
    except RuntimeError as error:
        found = str(error)
    if number == 0:
        print("SEEN" if "must match the size" in found else "GONE", found)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 4)
