"""Optimizer steps whose gradients a closure computes, inside ``optimizer.step(closure)``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def with_closure(args: Any, kwargs: Any, then: Callable[[], None]) -> tuple[Any, Any] | None:
    """Return the arguments of ``step(closure)`` with the closure wrapped so that ``then`` is called after it.

    https://docs.pytorch.org/docs/stable/optim.html (optimizer.step(closure)). Lightning's Trainer takes every step like this.

    Returns:
        Positional and keyword arguments of the step; None for a step without a closure.

    """
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def wrapped(*closure_args: Any, **closure_kwargs: Any) -> Any:
        result = closure(*closure_args, **closure_kwargs)
        then()
        return result

    return (args, {**kwargs, "closure": wrapped}) if "closure" in kwargs else ((args[0], wrapped, *args[2:]), kwargs)
