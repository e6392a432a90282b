"""Reader of what a walk compares after a call: gradients, modes, and sums of what is optimized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.probe.optimizer import flat_masters
from pytest_distcompat.probe.tensors import digest, local_of, zero3_shard
from pytest_distcompat.trace import CallInfo, Sums

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


def read_call(model: Module, returned: Any, *, observes: bool) -> CallInfo:
    """Return what a call left behind; ``returned`` is a mapping of whole tensors, or nothing to compare."""
    masters = {name: master for name, _, master in flat_masters(model)}
    optimized = {
        name: masters.get(name, zero3_shard(one) if hasattr(one, "ds_tensor") else local_of(one))
        for name, one in model.named_parameters()
    }
    return CallInfo(
        observes=observes,
        gradients={name: "" if one.grad is None else digest(one.grad) for name, one in model.named_parameters()},
        evaluating=tuple(name for name, module in model.named_modules() if not module.training),
        sums={name: _sums(tensor) for name, tensor in optimized.items()},
        returned={name: _sums(tensor) for name, tensor in returned.items() if hasattr(tensor, "numel")}
        if isinstance(returned, Mapping)
        else {},
    )


def _sums(tensor: torch.Tensor) -> Sums:
    import torch

    with torch.no_grad():
        values = local_of(tensor).double()
        return values.numel(), float(values.sum()), float(values.square().sum())
