"""torch 2.13.0: async_save cannot copy the sharded state dict of FSDP1, which has ShardedTensors.

Expected: it saves what ``save`` saves. Seen: RuntimeError "torch function 'data_ptr' ... not supported for ShardedTensor".
"""

import os
import tempfile

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29578"}

import torch
from torch import distributed, multiprocessing
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

RANKS = 2


def rank(number, place, found):
    distributed.init_process_group("gloo", rank=number, world_size=RANKS)
    model = FullyShardedDataParallel(
        torch.nn.Linear(8, 8), use_orig_params=True, device_id=torch.device("cpu")
    )
    model(torch.ones(1, 8)).sum().backward()
    checkpoint.save(get_model_state_dict(model), checkpoint_id=f"{place}/save")
    try:
        checkpoint.async_save(
            get_model_state_dict(model), checkpoint_id=f"{place}/async_save"
        ).result()
    except RuntimeError as error:
        found.put(str(error))


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    with tempfile.TemporaryDirectory() as place:
        multiprocessing.spawn(rank, (place, found), nprocs=RANKS)
    texts = [found.get() for _ in range(RANKS)] if not found.empty() else []
    print(
        "SEEN" if any("data_ptr" in text for text in texts) else "GONE",
        [text[:60] for text in texts],
    )
