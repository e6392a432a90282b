"""torch 2.13.0: FSDP1 trains a parameter that is not contiguous, and cannot save it as a sharded state dict.

Expected: it is saved, or refused when it is wrapped, as `fully_shard` refuses it. Seen: `ValueError: Only
torch.contiguous_format memory_format is currently supported` from the first `state_dict()`, after all training.
"""

import os

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29578"}

import torch
from torch import distributed, multiprocessing
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType

RANKS = 2


def rank(number, found):
    distributed.init_process_group("gloo", rank=number, world_size=RANKS)
    layer = torch.nn.Linear(13, 5)
    layer.weight = torch.nn.Parameter(torch.randn(13, 5).t())
    model = FullyShardedDataParallel(layer, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 13)).sum().backward()
    optimizer.step()
    FullyShardedDataParallel.set_state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
    )
    try:
        model.state_dict()
    except ValueError as error:
        found.put(str(error))


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    ranks = [context.Process(target=rank, args=(number, found)) for number in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
    text = "" if found.empty() else found.get()
    print("SEEN" if "contiguous_format" in text else "GONE", text)
