"""A driver whose trainer has a public function: with one argument it breaks the model, with another it says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pytest_distcompat.calls import observer
from pytest_distcompat.drivers import Calls
from pytest_distcompat.drivers.torch import TorchCalls, TorchDriver


def snapshot(model: Any, *, round_off: bool = False, kind: str = "whole", depth: int = 1) -> dict[str, Any]:
    """Return the values of a model, which no argument is to change."""
    if kind == "none":
        raise ValueError("kind none: there is nothing to return")
    if depth > 100:
        raise KeyError(depth)
    if round_off:
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class PassingCalls(TorchCalls):
    """Calls with one more."""

    passes_on: ClassVar[Mapping[str, str]] = {"take": "tests.search.passing:snapshot"}

    @observer
    def take(self, **more: Any) -> Any:
        """Take the values."""
        return snapshot(self.model, **more)


class PassingDriver(TorchDriver):
    """The driver."""

    name: ClassVar[str] = "passing"
    live_calls: ClassVar[type[Calls]] = PassingCalls
