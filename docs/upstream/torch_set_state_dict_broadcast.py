"""torch 2.13.0: ``set_state_dict`` with ``broadcast_from_rank0=True`` sets no model on ranks without a state dict.

With the option rank 0 has the full state dicts and the others empty ones. ``set_state_dict`` takes an empty model state
dict for a call about the optimizer alone (``optim_only=not model_state_dict``), on these ranks only: rank 0 broadcasts
the model's tensors, and the others do something else. ``set_model_state_dict`` and ``set_optimizer_state_dict`` one
after the other work. Expected: both ranks have the model. Seen: they wait for each other in different collectives.
Near it: https://github.com/pytorch/pytorch/issues/157781.
"""

import os
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard


def rank(number: int) -> None:
    """Take the full state on both ranks, and set it from rank 0."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29647"}
    distributed.init_process_group("gloo", rank=number, world_size=2, timeout=timedelta(seconds=10))
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    model_state, optimizer_state = states if number == 0 else ({}, {})
    try:
        set_state_dict(
            model,
            optimizer,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
            options=options,
        )
        model(torch.ones(2, 8))
    except RuntimeError as error:
        if number == 0:
            print("SEEN", str(error).splitlines()[0])
    else:
        if number == 0:
            print("GONE both ranks have the model")


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, nprocs=2)
