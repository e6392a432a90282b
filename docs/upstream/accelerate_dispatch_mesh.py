"""accelerate 1.15.0: beside tensor parallelism ``dispatch_batches`` gives all data parallel ranks the same rows.

``DataLoaderDispatcher`` refuses tensor parallelism beside data parallelism, but by mesh dimensions named "dp" and "fsdp"; those
of ``ParallelismConfig`` are "dp_replicate" and "dp_shard". It then hands one batch to all ranks, as for tensor parallelism
alone. An ``IterableDataset`` is dispatched by default. Expected: other rows on the other data parallel ranks, as with
``dispatch_batches=False``, or the refusal. Seen: all rows on every rank, so that the data parallel size buys nothing.
"""

import os

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(16))


def run(rank: int, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29571", "OMP_NUM_THREADS": "1", "ACCELERATE_TORCH_DEVICE": "cpu"}  # fmt: skip
    # Without a GPU accelerate would run DDP instead.
    PartialState(cpu=True)
    PartialState().distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2),
    )
    try:
        loader = accelerator.prepare(torch.utils.data.DataLoader(Rows(), batch_size=2))
        rows = [batch.tolist() for batch in loader]
    except ValueError as error:
        rows = str(error)
    results.put((rank, rows))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=4)
    rows = dict(results.get() for _ in range(4))
    print("SEEN" if rows[0] == rows[2] else "GONE", f"rank 0: {rows[0]}, rank 2: {rows[2]}")
