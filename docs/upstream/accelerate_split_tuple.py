"""accelerate 1.15.0: ``split_between_processes(apply_padding=True)`` raises TypeError for a tuple.

https://github.com/huggingface/accelerate/issues/4306. It adds a list to the part, which is a tuple. Expected: ``(1, 2)`` and
``(3, 3)``. Seen: TypeError on every rank, also where nothing is to be padded.
"""

import os

import torch
import torch.multiprocessing as mp
from accelerate import PartialState


def run(rank: int, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29590", "OMP_NUM_THREADS": "1"}  # fmt: skip
    state = PartialState(cpu=True)
    try:
        with state.split_between_processes((1, 2, 3), apply_padding=True) as part:
            results.put((rank, part))
    except TypeError as error:
        results.put((rank, f"TypeError: {error}"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=2)
    parts = dict(sorted([results.get(), results.get()], key=lambda part: part[0]))
    print(
        "GONE" if parts == {0: (1, 2), 1: (3, 3)} else "SEEN",
        f"rank 0 has {parts[0]}, rank 1 {parts[1]}",
    )
