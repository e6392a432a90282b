"""DeepSpeed 0.19.8: with ``pipeline_loading_checkpoint`` ranks that load a universal checkpoint of ZeRO-3 deadlock.

``_load_zero_checkpoint`` lets each rank wait for a message of the one before it. That message is
sent by the loading of ZeRO-3's own checkpoints alone, so that rank 1 waits for ever.

Expected: both ranks load. Seen: rank 1 runs into the time limit of its process group.
"""

import os
import tempfile
from argparse import Namespace
from datetime import timedelta

import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.checkpoint.ds_to_universal import main


def engine(**more):
    """ZeRO-3 around one layer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    zero = {"stage": 3, "pipeline_loading_checkpoint": True}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **more}
    return deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
    )[0]


def run(rank: int, place: str, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29606", "OMP_NUM_THREADS": "1"}  # fmt: skip
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=20))
    one = engine()
    one.backward(one(torch.ones(1, 8)).sum())
    one.step()
    one.save_checkpoint(place, tag="a")
    if rank == 0:
        main(
            Namespace(
                input_folder=f"{place}/a",
                output_folder=f"{place}/b",
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
    torch.distributed.barrier()
    two = engine(checkpoint={"load_universal": True})
    try:
        two.load_checkpoint(place, tag="b")
        result = "it loads"
    except RuntimeError as error:
        result = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if rank == 1:
        results.put(result)
    os._exit(0)


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(run, (place, results), nprocs=2)
    result = results.get()
    print("GONE" if result == "it loads" else "SEEN", f"rank 1: {result}")
