"""torch 2.13.0: under FSDP1 ``zero_grad`` does not discard what ``no_sync`` has added up, beside a frozen parameter.

With ``use_orig_params`` the gradient of a unit is discarded only if those of all its parameters are None
(``FlatParamHandle._reset_flat_param_grad_info_if_needed``). After ``no_sync`` a frozen parameter has one too, a view of zeros,
which an optimizer that does not hold the parameter leaves alone. Expected: the second batch's gradient. Seen: the sum of both.
"""

import os

import torch
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel


def gradient(*, frozen: bool) -> float:
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    )
    for layer in model:
        torch.nn.init.ones_(layer.weight)
    model[1].requires_grad_(not frozen)
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    with model.no_sync():
        model(torch.tensor([[100.0, 100.0]])).sum().backward()
    optimizer.zero_grad()  # the user skips this batch
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    optimizer.step()
    square = sum(
        (p.grad**2).sum() for p in model[0].parameters() if p.grad is not None
    ) + torch.zeros(())
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
    found = {frozen: gradient(frozen=frozen) for frozen in (True, False)}
    if number == 0:
        seen = "SEEN" if abs(found[True] - 5.0) > 1e-3 else "GONE"
        print(
            seen,
            f"the gradient's norm is {found[True]:.1f}; without a frozen layer {found[False]:.1f}, expected 5.0",
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
