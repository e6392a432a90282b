"""Wrapped optimizers: the torch optimizers inside them, and the parameters that they update.

A trainer's optimizer is a torch optimizer in any number of wrappers (``AcceleratedOptimizer`` of
accelerate, the ZeRO optimizers of DeepSpeed), or several of those in a list. ``optimizer``,
``gradients``, ``live`` and ``snapshot`` look through the wrappers with this module; so does
``ext.scripts`` for optimizers that it finds in a user's script.

The torch optimizer updates one of:

- the *live* parameters, those of the model as the trainer has wrapped it;
- master copies of them in float32, a tensor for each (DeepSpeed without ZeRO);
- flat partitions (ZeRO): see ``flat_masters``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from pytest_distcompat.probe.deepspeed_shards import named_parameters

if TYPE_CHECKING:
    from torch.nn import Module


def several(optimizer: Any) -> list[Any]:
    """Return the trainer's optimizers or schedulers as a list, empty for None.

    A trainer may have several: ``torch.optim.Muon`` needs a second optimizer for parameters that
    are no matrices.

    Args:
        optimizer: An optimizer or scheduler, an iterable of them, or None.
    """
    if optimizer is None:
        return []
    # A str is a mistake of the driver's, which the message about it shows whole.
    if isinstance(optimizer, Iterable) and not isinstance(optimizer, str):
        return list(optimizer)
    return [optimizer]


def entries(optimizer: Any) -> list[torch.Tensor]:
    """Return the tensors in the ``param_groups`` of all the optimizers, in order."""
    parameters: list[torch.Tensor] = []
    for wrapped in several(optimizer):
        for group in torch_optimizer(wrapped).param_groups:
            parameters.extend(group["params"])
    return parameters


def chain(optimizer: Any) -> list[Any]:
    """Return an optimizer's wrappers, the outermost first, and at the end the torch optimizer.

    With accelerate and DeepSpeed these may be a ``DeepSpeedOptimizerWrapper``, a
    ``DeepSpeedZeroOptimizer`` and an ``AdamW``.
    """
    # AcceleratedOptimizer, DeepSpeedOptimizerWrapper and DeepSpeed's ZeRO optimizers all have the
    # inner one as ``.optimizer``.
    wrappers = [optimizer]
    while True:
        inner = getattr(wrappers[-1], "optimizer", None)
        # An optimizer that has itself as ``.optimizer`` must not be followed for ever.
        if inner is None or inner in wrappers:
            return wrappers
        wrappers.append(inner)


def delegate(optimizer: Any) -> Any:
    """Return the optimizer that a torch optimizer delegates its step to, or the same optimizer."""
    # torch's ZeroRedundancyOptimizer has a second optimizer as ``optim``, which has this rank's
    # parameters and their state. Its own state is only what was loaded.
    inner = getattr(optimizer, "optim", None)
    if isinstance(inner, torch.optim.Optimizer):
        return inner
    return optimizer


def links(optimizer: Any) -> Iterator[Any]:
    """Yield the links of the ``chain`` of each of the trainer's optimizers, one by one."""
    for wrapped in several(optimizer):
        yield from chain(wrapped)


def torch_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside all wrappers; None for None."""
    if optimizer is None:
        return None
    return chain(optimizer)[-1]


def master_copies(optimizer: Any) -> dict[int, torch.Tensor]:
    """Map the ``id`` of each float32 master copy to its parameter in low precision.

    DeepSpeed has such copies where it runs without ZeRO (``FP16_UnfusedOptimizer``): one tensor for
    each parameter, unlike the flat masters of ZeRO. For any other optimizer the result is empty.
    """
    # They are in two lists that are not documented; ``tests/launch/test_private_names.py`` fails
    # when they change.
    for link in links(optimizer):
        low_precision_groups = getattr(link, "fp16_groups", None)
        master_groups = getattr(link, "fp32_groups", None)
        if low_precision_groups and master_groups:
            return _paired(low_precision_groups, master_groups)
    return {}


def _paired(low_precision_groups: Any, master_groups: Any) -> dict[int, torch.Tensor]:
    """Map the ``id`` of each master to the parameter at the same place of the same group."""
    parameter_by_master: dict[int, torch.Tensor] = {}
    for parameters, masters in zip(low_precision_groups, master_groups, strict=True):
        for parameter, master in zip(parameters, masters, strict=True):
            parameter_by_master[id(master)] = parameter
    return parameter_by_master


def owner_names(model: Module, optimizer: Any) -> dict[int, str]:
    """Map the ``id`` of each live parameter, and of each of its master copies, to its live name.

    A live name is that in the wrapped model: ``module.lm_head.weight`` under DDP. An optimizer has
    tensors without names, which this map names.
    """
    names: dict[int, str] = {}
    for name, parameter in named_parameters(model):
        names[id(parameter)] = name
    copies: dict[int, str] = {}
    for copy_id, parameter in master_copies(optimizer).items():
        if id(parameter) in names:
            copies[copy_id] = names[id(parameter)]
    return names | copies
