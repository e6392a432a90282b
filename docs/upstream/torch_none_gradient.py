"""torch 2.13.0: redistributing a DTensor has no backward pass if the gradient of its result is None.

Since 2.12 ``to_local`` hands a gradient that is None on as None. ``DTensor.redistribute``, which comes before it where a layer of
tensor parallelism gathers or adds up its output, still has autograd fill in zeros, and these are a plain tensor. So a layer whose
output goes through a function that returns no gradient ends training, while plain torch trains the other layers.
Expected: the parameters behind it get no gradient. Seen: an AttributeError.
"""

import os
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(_context: Any, _gradient: torch.Tensor) -> None:
        return None


def main() -> None:
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29634",
    }
    distributed.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
    rows = torch.ones(2, 4)
    outputs = NoGradient.apply(model(rows))  # type: ignore[no-untyped-call]
    try:
        (outputs.sum() + 0 * rows.sum()).backward()
    except AttributeError as error:
        print("SEEN", error)
    else:
        print("GONE", [parameter.grad for parameter in model.parameters()])
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
