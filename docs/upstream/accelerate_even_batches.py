"""accelerate 1.15.0: ``even_batches=False`` is ignored with ``dispatch_batches=True``, and of an iterable dataset.

Only the shards of a batch sampler read it. ``DataLoaderDispatcher`` and ``IterableDatasetShard`` fill the last batches with rows
of the beginning all the same. Expected: each of 7 rows once, as without ``dispatch_batches``, or a refusal. Seen: a row twice.
"""

import os

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator, DataLoaderConfiguration


def run(rank: int, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29577", "OMP_NUM_THREADS": "1"}  # fmt: skip
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=True, even_batches=False),
    )
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(7), batch_size=2))
    results.put([row for batch in loader for row in batch.tolist()])
    accelerator.end_training()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=2)
    rows = sorted(results.get() + results.get())
    print("GONE" if rows == list(range(7)) else "SEEN", f"the ranks are given {rows}")
