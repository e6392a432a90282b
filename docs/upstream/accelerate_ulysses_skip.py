"""accelerate 1.15.0, deepspeed 0.19.8: batches of a loader under Ulysses (``sp_size``) cannot be skipped, so nothing resumes.

``prepare`` returns DeepSpeed's ``UlyssesSPDataLoaderAdapter``, and ``skip_first_batches``, which the documentation resumes with,
reads ``dataset`` of it. Expected: a loader that begins at the batch, as without ``sp_size``. Seen: ``AttributeError:
'UlyssesSPDataLoaderAdapter' object has no attribute 'dataset'``.
"""

import os

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs, ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


def rank(number: int) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29624"}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(
            hf_ds_config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
        ),
        parallelism_config=ParallelismConfig(sp_size=2, sp_handler=handler),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    tokens = torch.arange(8)
    loader = DataLoader(
        [{"input_ids": tokens, "labels": tokens, "position_ids": tokens}] * 8, batch_size=1
    )
    loader, model, _ = accelerator.prepare(loader, model, torch.optim.AdamW(model.parameters()))
    try:
        found = f"{len(list(accelerator.skip_first_batches(loader, 2)))} batches are left"
    except AttributeError as error:
        found = str(error)
    if number == 0:
        print("SEEN" if "has no attribute 'dataset'" in found else "GONE", found)
    accelerator.end_training()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
