"""accelerate 1.15.0: of fewer rows than half the ranks ``dispatch_batches`` gives some ranks an empty batch.

``DataLoaderDispatcher`` fills the last batch by adding the first one's rows once. Where that is the same batch of one row, two
ranks of four have one row each and two none: their mean loss is NaN, and a ``gather`` of unequal shapes hangs. Expected: a row
for each rank, as without ``dispatch_batches``. Seen: empty batches. Iterable datasets are dispatched by default.
"""

import os

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator, DataLoaderConfiguration


def run(rank: int, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29581", "OMP_NUM_THREADS": "1"}  # fmt: skip
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(1), batch_size=2))
    results.put([batch.tolist() for batch in loader])
    accelerator.end_training()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=4)
    batches = [results.get() for _ in range(4)]
    print("SEEN" if [[]] in batches else "GONE", f"the ranks are given {batches}")
