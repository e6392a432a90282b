"""DeepSpeed 0.19.8: under AutoTP ``save_16bit_model`` writes the parts of rank 0, and returns True.

It takes the module's own state dict for every stage but ZeRO-3. ``_consolidated_16bit_state_dict``, which accelerate and Trainer
call, gathers the parts, and leaves out buffers. Expected: a file with the whole weight and the buffer. Seen: half of the weight.
"""

import os
import tempfile
from pathlib import Path

import deepspeed
import torch
from torch import distributed, nn


def rank(number: int, directory: str) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(number),
        "LOCAL_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29621"}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo")
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(4))
    specs = {"use_default_specs": False, "layer_specs": [{"patterns": [r"0\.weight$"]}]}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2, "partition_config": specs},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
    )
    done, gathered = engine.save_16bit_model(directory), engine._consolidated_16bit_state_dict()
    if number == 0:
        shape = tuple(torch.load(Path(directory) / "pytorch_model.bin")["0.weight"].shape)
        missing = sorted({*engine.module.state_dict()} - {*gathered})
        words = f"save_16bit_model: {done}, weight {shape} of (8, 4); gathered without {', '.join(missing)}"
        print("SEEN" if done and shape != (8, 4) else "GONE", words)
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(rank, (place,), 2)
