"""accelerate 1.15.0: resumed in an epoch, a loader with ``dispatch_batches`` fills the last batch with other rows.

``DataLoaderDispatcher`` keeps rows of the first batch that it reads to fill the last one, and after ``skip_first_batches`` that
is another batch. Shards of a sampler fill it from the beginning of the data. Expected: the batches of the run that never stopped.
Seen: another row in the last one, so that a resumed training is not the same.
"""

import os

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator, DataLoaderConfiguration


def run(rank: int, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29579", "OMP_NUM_THREADS": "1"}  # fmt: skip
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=True, split_batches=True),
    )
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(15), batch_size=4))
    whole = [batch.tolist() for batch in loader]
    skipped = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)]
    if rank == 1:
        results.put((whole[2:], skipped))
    accelerator.end_training()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=2)
    expected, found = results.get()
    print(
        "GONE" if expected == found else "SEEN",
        f"rank 1 is given {found} after skipping 2 batches; expected {expected}",
    )
