"""accelerate 1.15.0: ``split_between_processes`` changes the dict that it is called with.

It writes this rank's part into the caller's dict. Expected: after the block the dict has all rows. Seen: it has those of this rank; a
second call splits these again, and what compares with the whole data set later finds half of it.
"""

import os

import torch
import torch.multiprocessing as mp
from accelerate import PartialState


def run(rank: int, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29589", "OMP_NUM_THREADS": "1"}  # fmt: skip
    state = PartialState(cpu=True)
    prompts = {"text": ["a", "b", "c", "d"]}
    with state.split_between_processes(prompts):
        pass
    if rank == 0:
        results.put(prompts["text"])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=2)
    left = results.get()
    print(
        "GONE" if left == ["a", "b", "c", "d"] else "SEEN",
        f"the caller's dict has {left} after the block, not all four",
    )
