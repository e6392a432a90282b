"""``Exchange``: a function of a trainer by which ranks exchange values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_distcompat.exchanges.laws import Law


@dataclass(frozen=True)
class Exchange:
    """A function by which ranks exchange values.

    Attributes:
        call: The function. It is called on all ranks at once, with one value, and returns what this
            rank gets. The value may be a tensor on this rank's device, or a dict, list or tuple.
        law: What it should give, such as ``Gathers()``.
        unsupported: Name of a value that the function is not made for -> the reason. It is not
            called with that. Names are those of the law's ``values``, such as ``bool``.
        in_place: Whether it may change the value that it is called with, as torch's collectives do.
    """

    call: Callable[[Any], Any]
    law: Law
    unsupported: Mapping[str, str] = field(default_factory=dict)
    in_place: bool = False
