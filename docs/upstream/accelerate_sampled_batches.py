"""accelerate 1.15.0: a sampler of whole batches (``batch_size=None``) loses its epoch and its seedable sampler.

``prepare`` takes such a loader, of which torch's documentation speaks under "Disable automatic batching", and shards the sampler of
batches; but ``set_epoch`` and ``set_sampler`` look below ``batch_sampler``, which is None, and at the shard. Expected: another order
in the second epoch, and with ``use_seedable_sampler=True`` the same one whenever that epoch is set. Seen: the order of the first
epoch; and one that the state of the global generator decides, which a resumed run or another number of ranks does not have. On one
rank ``prepare`` raises TypeError (got multiple values for keyword argument 'batch_size'):
https://github.com/huggingface/accelerate/issues/2392.
"""

import os

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, rows):
        return torch.tensor(rows)


class Shuffled(Sampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(8, generator=generator).tolist()


def prepared(sampler):
    configuration = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    batches = BatchSampler(sampler, batch_size=2, drop_last=False)
    loader = DataLoader(Rows(), batch_size=None, sampler=batches)
    return accelerator.prepare(loader)


def read(loader, epoch):
    loader.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


def run(rank: int, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29585", "OMP_NUM_THREADS": "1"}  # fmt: skip
    torch.manual_seed(0)
    loader = prepared(Shuffled())
    own = [read(loader, epoch) for epoch in (0, 1)]
    loader = prepared(RandomSampler(Rows()))
    seedable = [read(loader, epoch) for epoch in (1, 1)]
    results.put((own, seedable))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=2)
    own, seedable = results.get()
    print("SEEN" if own[0] == own[1] else "GONE", f"epochs 1 and 2: {own[0]} and {own[1]}")
    print(
        "SEEN" if seedable[0] != seedable[1] else "GONE",
        f"epoch 2, read twice: {seedable[0]} and {seedable[1]}",
    )
