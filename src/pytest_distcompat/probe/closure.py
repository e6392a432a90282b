"""Steps whose gradients a closure computes, inside of ``optimizer.step(closure)``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def with_closure(args: Any, kwargs: Any, then: Callable[[], None]) -> tuple[Any, Any] | None:
    """``step(closure)``'s arguments with one that calls ``then`` when it has returned; None for a step without a closure.

    https://docs.pytorch.org/docs/stable/optim.html (optimizer.step(closure)); Lightning's Trainer takes every step so.
    """
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def evaluated(*given: Any, **named: Any) -> Any:
        result = closure(*given, **named)
        then()
        return result

    return (
        (args, {**kwargs, "closure": evaluated}) if "closure" in kwargs else ((args[0], evaluated, *args[2:]), kwargs)
    )
