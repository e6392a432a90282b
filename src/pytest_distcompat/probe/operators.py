"""Facts of single operators of torch, as a dispatch mode sees them.

A dispatch mode of torch gets each operator (``aten::mm``, ``c10d::allreduce_``) before it runs,
with its arguments. ``observe.Observer`` has such a mode, and asks this module whether an operator
multiplies matrices or computes in float8, and what a collective sends to which ranks.
"""

from __future__ import annotations

import re
from typing import Any

import torch

#: The dtypes of the factors of float8 matrix products.
FLOAT8 = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)


#: The ends of the names of operators that multiply matrices, attention included.
MULTIPLIES = re.compile(r"::(mm|addmm|bmm|baddbmm|_scaled_mm|_scaled_dot_product_\w+)$")


def is_float8(value: Any) -> bool:
    """Tell whether a value is a tensor in one of the 8-bit floating-point dtypes."""
    return isinstance(value, torch.Tensor) and value.dtype in FLOAT8


def group_ranks(func: Any, args: Any) -> tuple[int, ...]:
    """Return the ranks of a c10d operator's process group; empty without a group."""
    # A functional collective may have the name of the group, which only a private function
    # resolves. The schema of an operator is private too. ``tests/launch/test_private_names.py``
    # fails when they change.
    from torch.distributed import ProcessGroup, distributed_c10d, get_process_group_ranks

    group: Any = None
    parameters = func._schema.arguments  # noqa: SLF001 - see above
    for argument, value in zip(parameters, args, strict=False):
        if argument.name in {"process_group", "group_name"}:
            group = value
            break
    if isinstance(group, str):
        resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]  # noqa: SLF001
        group = resolve(group)
    elif group is not None and not isinstance(group, ProcessGroup):
        group = ProcessGroup.unbox(group)
    if group is None:
        return ()
    return tuple(get_process_group_ranks(group))


def sent_tensors(args: Any) -> list[torch.Tensor]:
    """Return the input tensors of a c10d operator: outputs come first in its arguments.

    So the last argument that is a tensor, or a list with tensors, has the inputs. The result is
    empty for a barrier.
    """
    for argument in reversed(args):
        values = argument if isinstance(argument, (list, tuple)) else [argument]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if tensors:
            return tensors
    return []
