"""DeepSpeed 0.19.8: a pipeline in bfloat16 without ZeRO cannot load the checkpoint that it saved.

A ``PipelineEngine`` has ``BF16_Optimizer`` there, which partitions as ZeRO-1 does. Since
https://github.com/deepspeedai/DeepSpeed/pull/7586 a checkpoint of stage 0 is loaded from the file
of the model in place of the partitions' own files, and the optimizer asks that for a list of
ranks. ZeRO-1 has no such failure.

Expected: it loads. Seen: KeyError: 0.
"""

import os
import tempfile
from datetime import timedelta

import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.pipe import PipelineModule


def run(rank: int, place: str, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29609", "OMP_NUM_THREADS": "1"}  # fmt: skip
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=60))
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    module = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    optimizer = torch.optim.AdamW(module.parameters())
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    row = torch.ones(1, 4, dtype=torch.bfloat16)
    engine.train_batch(iter([(row, row)]))
    engine.save_checkpoint(place)
    try:
        engine.load_checkpoint(place)
        result = "it loads"
    except KeyError as error:
        result = f"KeyError: {error}"
    if rank == 0:
        results.put(result)


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(run, (place, results), nprocs=2)
    result = results.get()
    print("GONE" if result == "it loads" else "SEEN", result)
