"""``Exchange``: a function of a trainer by which ranks exchange values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_distcompat.exchanges.contracts import Contract


@dataclass(frozen=True)
class Exchange:
    """A function by which ranks exchange values.

    Attributes:
        call: The function. It is called on all ranks at once, with one argument, and returns what
            this rank gets. The argument may be a tensor on this rank's device, or a dict, list or
            tuple.
        contract: What each rank should get, such as ``Gathers()``.
        unsupported: Name of a value that the function is not made for -> the reason. It is not
            called with that. Names are those of ``contract.values``, such as ``bool``.
        in_place: Whether it may change its argument. If it then returns None, that is the result,
            as with torch's collectives. It is not called with tensors that require a gradient.
    """

    call: Callable[[Any], Any]
    contract: Contract
    unsupported: Mapping[str, str] = field(default_factory=dict)
    in_place: bool = False
