"""torch 2.13.0: under FSDP1 ``zero_grad`` does not discard a gradient from before ``no_sync``.

A gradient that was kept after a step is put aside when the next backward runs under ``no_sync``, and added again in the next one
that reduces. In between ``zero_grad`` does not reach it. Expected: the gradient of the last batch. Seen: the sum with the first.
"""

import os

import torch
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel


def gradient(*, set_to_none: bool) -> float:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.tensor([[100.0, 100.0]])).sum().backward()
    with model.no_sync():
        model(torch.tensor([[100.0, 100.0]])).sum().backward()
    optimizer.zero_grad(set_to_none=set_to_none)  # the user begins anew
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    square = sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None) + torch.zeros(
        ()
    )
    distributed.all_reduce(square)
    return float(square) ** 0.5


def rank(number: int) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29603",
    }
    distributed.init_process_group("gloo")
    found = {set_to_none: gradient(set_to_none=set_to_none) for set_to_none in (True, False)}
    if number == 0:
        wrong = [
            f"zero_grad(set_to_none={how}): the norm is {norm:.1f}"
            for how, norm in found.items()
            if norm > 5.001
        ]
        print("SEEN" if wrong else "GONE", *wrong, "expected 5.0", sep="\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
