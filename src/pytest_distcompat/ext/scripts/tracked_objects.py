"""Models, optimizers and schedulers of a script, by weak references, and which of them belong together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.trace import UnwrappedInfo


_T = TypeVar("_T")


def _alive(references: Iterable[weakref.ref[_T]]) -> list[_T]:
    return [found for reference in references if (found := reference()) is not None]


class TrackedObjects:
    """Models, optimizers and schedulers seen so far in one rank; ``blocks`` are class names of the models' blocks, if given."""

    def __init__(self, blocks: tuple[str, ...] = ()) -> None:
        self._blocks = blocks
        self.models: list[weakref.ref[Module]] = []
        self.optimizers: list[weakref.ref[Any]] = []
        self.schedulers: list[weakref.ref[Any]] = []
        #: torch's own optimizers in the order they were made; ``optimizers`` are as the trainer has them, maybe wrapped.
        self.torch_optimizers: list[weakref.ref[Any]] = []
        self.accelerator: weakref.ref[Any] | None = None
        self._unwrapped: dict[int, tuple[weakref.ref[Module], UnwrappedInfo]] = {}

    def read_unwrapped(self, model: Module) -> None:
        """Read a model that is about to be wrapped, once. Parts that are wrapped already count as they were before that."""
        from pytest_distcompat.probe.blocks import unwrapped
        from pytest_distcompat.probe.live import read_parts

        model = unwrapped(model)
        known = {key: info for key, (reference, info) in self._unwrapped.items() if reference() is not None}
        if id(model) not in known:
            self._unwrapped[id(model)] = weakref.ref(model), read_parts(model, known, self._blocks)

    def unwrapped_of(self, model: Module) -> UnwrappedInfo | None:
        """Return what was read of the largest unwrapped model inside this one; None if there is none."""
        inside = {id(module) for module in model.modules()}
        infos = [
            info for key, (reference, info) in self._unwrapped.items() if key in inside and reference() is not None
        ]
        return max(infos, key=lambda info: len(info.parameters), default=None)

    def model_of(self, optimizer: Any) -> Module | None:
        """Return the largest model of which the optimizer holds a parameter; if it holds none, or is None, the largest."""
        groups = optimizer.param_groups if optimizer is not None else ()
        held = {id(parameter) for group in groups for parameter in group["params"]}
        alive = _alive(self.models)
        trained = [model for model in alive if any(id(parameter) in held for parameter in model.parameters())]
        return max(trained or alive, key=lambda model: sum(1 for _ in model.modules()), default=None)

    def wrapper_of(self, optimizer: Any) -> Any:
        """Return the trainer's wrapper of that torch optimizer, or the optimizer itself if no wrapper was seen."""
        from pytest_distcompat.probe.optimizer import torch_optimizer

        wrappers = reversed(_alive(self.optimizers))
        return next((one for one in wrappers if torch_optimizer(one) is optimizer), optimizer)

    def last_optimizer(self) -> Any:
        """Return the optimizer that the trainer wrapped last, None if there is none."""
        return next(reversed(_alive(self.optimizers)), None)

    def last_torch_optimizer(self) -> Any:
        """Return torch's own optimizer that was made last, None if there is none."""
        return next(reversed(_alive(self.torch_optimizers)), None)

    def optimizers_with(self, optimizer: Any, model: Module | None) -> Any:
        """Return the optimizer, or a list of it and all others that train the model, in the order they were made."""
        from pytest_distcompat.probe.optimizer import entries, torch_optimizer

        inner = torch_optimizer(optimizer)
        known = [one for one in _alive(self.torch_optimizers) if hasattr(one, "param_groups")]
        live = {id(parameter) for parameter in model.parameters()} if model is not None else set()
        held = {id(parameter) for parameter in entries(inner)}
        chosen = [inner]
        # The latest come first: an optimizer that was dropped holds the same parameters as the one that replaced it.
        for candidate in reversed(known):
            own = {id(parameter) for parameter in entries(candidate)}
            if own & live and not own & held:
                chosen.append(candidate)
                held |= own
        if len(chosen) == 1:
            return self.wrapper_of(optimizer)
        order = {id(one): index for index, one in enumerate(known)}
        return [self.wrapper_of(one) for one in sorted(chosen, key=lambda one: order.get(id(one), -1))]

    def schedulers_of(self, optimizer: Any) -> Any:
        """Return the scheduler of that optimizer, None if it has none; for a list of optimizers a list of schedulers."""
        from pytest_distcompat.probe.optimizer import torch_optimizer

        if isinstance(optimizer, list):
            return [scheduler for one in optimizer if (scheduler := self.schedulers_of(one)) is not None]
        inner = torch_optimizer(optimizer)
        schedulers = reversed(_alive(self.schedulers))
        return next((one for one in schedulers if torch_optimizer(one.optimizer) is inner), None)

    def accelerator_attribute(self, name: str) -> Any:
        """Return an attribute of the script's Accelerator, None without one."""
        return getattr(self.accelerator() if self.accelerator is not None else None, name, None)
