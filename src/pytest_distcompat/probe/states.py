"""Records of single entries of an optimizer: one tensor of its state, numbers of its groups.

``optimizer`` and ``flat_masters`` call this module for each entry of the state, such as the
``exp_avg`` of one parameter, and ``optimizer`` and ``observe`` for each parameter group. The record
of an entry, a ``StateInfo``, has no values: it has dtype, number of elements, a *digest* (a hash of
the values that this rank has) and a *layout* (which part of the whole tensor these are).
"""

from __future__ import annotations

from typing import Any

import torch

from pytest_distcompat.probe.layouts import layout_of
from pytest_distcompat.probe.tensors import digest, local_of, stored_dtype, stored_parts
from pytest_distcompat.trace import WHOLE, Layout, StateInfo


def numbers_of(group: dict[str, Any]) -> dict[str, float]:
    """Return the hyperparameters of a parameter group that are numbers.

    AdamW's are ``{"lr": 0.001, "betas.0": 0.9, "betas.1": 0.999, "weight_decay": 0.01, ...}``: each
    number of a tuple is one of its own.
    """
    numbers: dict[str, float] = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, (tuple, list)):
            for index, element in enumerate(value):
                if is_number(element):
                    numbers[f"{key}.{index}"] = float(element)
        elif is_number(value):
            numbers[key] = float(value)
    return numbers


def is_number(value: Any) -> bool:
    """Tell whether a value is a tensor or a number; a flag such as ``amsgrad`` is not."""
    if isinstance(value, bool):
        return False
    return isinstance(value, (torch.Tensor, int, float))


def state_info(
    owner: str,
    key: str,
    value: Any,
    layout: Layout,
    starts: torch.Tensor | None = None,
) -> StateInfo:
    """Return the record of one entry of an optimizer's state.

    Args:
        owner: The name of the parameter that it belongs to, or ``partition 0`` for a flat
            partition of ZeRO, which has many parameters.
        key: Its key, such as ``exp_avg``.
        value: A tensor or a number.
        layout: That of the owner, which says what part of it this rank has; the entry has it too,
            unless it is a step count or a DTensor.
        starts: Where each run of consecutive elements that this rank has starts in the flattened
            full tensor, as ``[3, 9, 15, 21]`` for columns 3 to 5 of a matrix of shape (4, 6). The
            digest depends on it. None if ``digest`` is to find out itself.
    """
    if not isinstance(value, torch.Tensor):
        dtype = type(value).__name__
        return StateInfo(owner, key, dtype, numel=1, digest=digest(value))
    if key == "step":
        # One number, which is no part of anything.
        layout = WHOLE
    # ``local_of`` is this rank's shard of a DTensor. A quantized tensor is stored as several parts:
    # its codes, and scales for them.
    return StateInfo(
        owner=owner,
        key=key,
        dtype=stored_dtype(value),
        numel=local_of(value).numel(),
        digest=digest(value, starts),
        layout=layout_of(value, layout),
        nbytes=sum(part.nbytes for part in stored_parts(value)),
    )
