"""transformers 5.23.0, deepspeed 0.19.8: a training under Ulysses (``sp_size``) that resumes has the order of the first epoch.

Trainer tells the loader its epoch by ``set_epoch``, if the loader has it. ``UlyssesSPDataLoaderAdapter`` has no such method, and
does not hand it on to the loader that it wraps, which counts epochs from 0 in each process. Expected: a fresh process that begins
with the second epoch has the order of that. Seen: the order of the first.
"""

import os

os.environ |= {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29642",
}
import deepspeed
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed("gloo")
configuration = DataLoaderConfiguration(use_seedable_sampler=True)  # Trainer's default
accelerator = Accelerator(cpu=True, dataloader_config=configuration)
rows = [
    {name: torch.full((4,), row) for name in ("input_ids", "labels", "position_ids")}
    for row in range(8)
]


def order(loader: object, epoch: int) -> list[int]:
    # As Trainer begins an epoch: ``Trainer._run_epoch``.
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    return [int(batch["input_ids"][0, 0]) for batch in loader]


def in_a_process() -> object:
    set_seed(0)
    prepared = accelerator.prepare(torch.utils.data.DataLoader(rows, batch_size=1, shuffle=True))
    return UlyssesSPDataLoaderAdapter(
        prepared, 0, torch.distributed.group.WORLD, 1, torch.device("cpu")
    )


whole = in_a_process()
first, second = order(whole, 0), order(whole, 1)
resumed = order(in_a_process(), 1)
print("SEEN" if resumed == first != second else "GONE", f"{first}, {second}; resumed {resumed}")
