"""accelerate 1.15.0: ``skip_first_batches`` of a loader with ``dispatch_batches=True`` skips too few batches.

``DataLoaderDispatcher`` makes each batch of ``num_processes`` batches of the sampler, and ``SkipBatchSampler`` skips as many of
the sampler's as it is told, not ``num_processes`` times as many. Expected: after ``skip_first_batches(loader, 2)`` the third
batch. Seen: the second on two ranks. A Trainer with ``dispatch_batches`` that resumes in an epoch trains on rows again.
"""

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator, DataLoaderConfiguration


def run(rank: int, results) -> None:
    import os

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29561", "OMP_NUM_THREADS": "1"}  # fmt: skip
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(16), batch_size=2))
    whole = [batch.tolist() for batch in loader]
    skipped = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)]
    if rank == 0:
        results.put((whole[2:], skipped))
    accelerator.end_training()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=2)
    expected, found = results.get()
    print(
        "GONE" if expected == found else "SEEN",
        f"{found} after skipping 2 batches; expected {expected}",
    )
