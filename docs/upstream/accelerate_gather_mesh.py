"""accelerate 1.15.0: beside tensor parallelism ``gather_for_metrics`` returns each row more than once.

It gathers from all processes, and those of one tensor-parallel group are fed the same rows. At the end of the data it keeps
the first ``remainder`` rows, as if each were there once. Expected: the 7 rows of the data, each once. Seen: 11 rows, of which
five are there twice, one once, and one is missing: a metric over them is another one.
"""

import os

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def run(rank: int, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29573", "OMP_NUM_THREADS": "1", "ACCELERATE_TORCH_DEVICE": "cpu"}  # fmt: skip
    # Without a GPU accelerate would run DDP instead.
    PartialState(cpu=True)
    PartialState().distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2),
    )
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(7), batch_size=2))
    rows = [row for batch in loader for row in accelerator.gather_for_metrics(batch).tolist()]
    if rank == 0:
        results.put(sorted(rows))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=4)
    rows = results.get()
    print("GONE" if rows == list(range(7)) else "SEEN", f"gathered {rows}")
