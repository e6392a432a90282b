"""torch 2.13.0: DCP cannot load the optimizer of an FSDP1 model of which a rank has no shard of some parameter.

A ShardedTensor without a local shard is dropped from what that rank asks for. Expected: the state loaded, as with fewer ranks.
Seen: ``Missing key in checkpoint state_dict: optimizer.param_groups``.
"""

import os
import tempfile

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29588"}

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, multiprocessing
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig

RANKS = 4


def rank(number, place, found):
    distributed.init_process_group("gloo", rank=number, world_size=RANKS)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Linear(13, 5))
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    kind = StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    FullyShardedDataParallel.set_state_dict_type(model, *kind)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=place)
    try:
        dcp.load(state, checkpoint_id=place)
    except BaseException as error:  # a CheckpointException is not an Exception
        found.put(str(error).strip().splitlines()[-1])


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    with tempfile.TemporaryDirectory() as place:
        ranks = [
            context.Process(target=rank, args=(number, place, found)) for number in range(RANKS)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(120)
    text = "" if found.empty() else found.get()
    print("SEEN" if "Missing key in checkpoint state_dict" in text else "GONE", text)
