"""accelerate 1.15.0: with ``dispatch_batches`` a loader of whole batches (``batch_size=None``) loses its sampler.

``prepare`` hands ``DataLoaderDispatcher`` the loader's ``batch_sampler``, which is None, and not its ``sampler``. So rank 0 asks the
data set for single rows in their own order, and cuts each row into parts as if it were a batch. Expected: each rank is given
batches of two rows, as the sampler has them. Seen: numbers of one row after the other, without an error; of other shapes
RuntimeError (batches of different size).
"""

import os

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader, Dataset


class Rows(Dataset):
    """Eight rows of two numbers: 0 and 0.5, 1 and 1.5, ...; asked for a list of rows it gives a batch."""

    def __len__(self):
        return 8

    def __getitem__(self, rows):
        first = torch.tensor(rows, dtype=torch.float32)
        return torch.stack([first, first + 0.5], dim=-1)


def run(rank: int, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29587", "OMP_NUM_THREADS": "1"}  # fmt: skip
    backwards = BatchSampler(range(7, -1, -1), batch_size=2, drop_last=False)
    loader = DataLoader(Rows(), batch_size=None, sampler=backwards)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )
    given = [batch.tolist() for batch in accelerator.prepare(loader)]
    if rank == 0:
        results.put(given)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=2)
    given = results.get()
    expected = [[[7.0, 7.5], [6.0, 6.5]], [[3.0, 3.5], [2.0, 2.5]]]
    print("GONE" if given == expected else "SEEN", f"rank 0 is given {given}, not {expected}")
