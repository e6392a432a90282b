"""deepspeed 0.19.8: a loop that counts the batches of Ulysses' loader gets an empty step in each epoch but the first.

``UlyssesSPDataLoaderAdapter`` is its own iterator, and begins anew only once somebody has read on after its last batch.
``transformers.Trainer`` (5.23.0) reads as many batches as the loader has, and then begins the next epoch: its first step is given
no batch, and the last batch of the epoch is never trained on. Expected: all batches in each epoch. Seen: none in the second.
"""

import itertools
import os

os.environ |= {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29641",
}
import deepspeed
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed("gloo")
tokens = torch.arange(4)
rows = [{"input_ids": tokens, "labels": tokens, "position_ids": tokens}] * 6
loader = UlyssesSPDataLoaderAdapter(
    torch.utils.data.DataLoader(rows, batch_size=2),
    sp_rank=0,
    sp_group=torch.distributed.group.WORLD,
    sp_world_size=1,
    device=torch.device("cpu"),
)
epochs = [len(list(itertools.islice(iter(loader), len(loader)))) for _ in range(2)]
print("SEEN" if epochs == [3, 0] else "GONE", f"of 3 batches {epochs} in two epochs")
