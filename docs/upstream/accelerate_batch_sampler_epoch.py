"""accelerate 1.15.0: ``set_epoch`` does not reach a user's own ``batch_sampler`` on several ranks.

``prepare`` wraps it in ``BatchSamplerShard``, which has no ``set_epoch``; ``DataLoaderShard.set_epoch`` looks for that of the
shard, and for that of the sampler inside the batch sampler. https://github.com/huggingface/accelerate/pull/3246 mended it for one
process alone, ``DataLoaderDispatcher`` (``dispatch_batches=True``) not even there. Expected: another order in the second epoch, as
with one process. Seen: the order of the first one.
"""

import os

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator


class Batches(torch.utils.data.BatchSampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        batches = list(super().__iter__())
        first = self.epoch % len(batches)
        yield from batches[first:] + batches[:first]


def run(rank: int, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29583", "OMP_NUM_THREADS": "1"}  # fmt: skip
    accelerator = Accelerator(cpu=True)
    rows = range(8)
    batch_sampler = Batches(torch.utils.data.SequentialSampler(rows), batch_size=2, drop_last=False)
    loader = accelerator.prepare(torch.utils.data.DataLoader(rows, batch_sampler=batch_sampler))
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
    results.put(epochs)
    accelerator.end_training()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=2)
    first, second = results.get()
    print("SEEN" if first == second else "GONE", f"a rank is given {first}, then {second}")
