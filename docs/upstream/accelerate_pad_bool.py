"""accelerate 1.15.0: ``pad_across_processes`` makes int64 of bool, on those ranks alone that it pads.

https://github.com/huggingface/accelerate/issues/3218 (closed as stale). ``new_zeros(...) + pad_index`` is int64 for bool. The rank
with the longest tensor returns it as it is. Expected: bool on both ranks. Seen: int64 and bool, so that a gather of the padded masks
adds up elements of different sizes.
"""

import os

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator


def run(rank: int, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29588", "OMP_NUM_THREADS": "1"}  # fmt: skip
    accelerator = Accelerator(cpu=True)
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, dtype=torch.bool))
    results.put((rank, str(padded.dtype)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=2)
    dtypes = dict(sorted([results.get(), results.get()]))
    gone = set(dtypes.values()) == {"torch.bool"}
    print(
        "GONE" if gone else "SEEN",
        f"rank 0 has {dtypes[0]}, rank 1 {dtypes[1]}; expected torch.bool",
    )
