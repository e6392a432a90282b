"""Models, optimizers and schedulers of a script, by weak references, and which of them belong together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.trace import UnwrappedInfo


_T = TypeVar("_T")


@dataclass(frozen=True)
class _UnwrappedModel:
    """A model that was read before it was wrapped, and what was read of it."""

    model: weakref.ref[Module]
    info: UnwrappedInfo


def _alive(references: Iterable[weakref.ref[_T]]) -> list[_T]:
    """Return the objects that the script has not dropped yet, in order."""
    objects: list[_T] = []
    for reference in references:
        referent = reference()
        if referent is not None:
            objects.append(referent)
    return objects


def _last_alive(references: Iterable[weakref.ref[Any]]) -> Any:
    """Return the last object that the script has not dropped yet, None if there is none."""
    objects = _alive(references)
    return objects[-1] if objects else None


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
        #: By the ``id`` of the model. Those of models that are gone are stale.
        self._unwrapped: dict[int, _UnwrappedModel] = {}

    def read_unwrapped(self, model: Module) -> None:
        """Read a model that is about to be wrapped, once. Parts that are wrapped already count as they were before that."""
        from pytest_distcompat.probe.blocks import unwrapped
        from pytest_distcompat.probe.live import read_parts

        model = unwrapped(model)
        known = self._unwrapped_by_id()
        if id(model) not in known:
            self._unwrapped[id(model)] = _UnwrappedModel(
                weakref.ref(model), read_parts(model, known, self._blocks)
            )

    def _unwrapped_by_id(self) -> dict[int, UnwrappedInfo]:
        """Return what was read of each unwrapped model that still exists, by the model's ``id``."""
        infos: dict[int, UnwrappedInfo] = {}
        for key, unwrapped in self._unwrapped.items():
            if unwrapped.model() is not None:
                infos[key] = unwrapped.info
        return infos

    def unwrapped_of(self, model: Module) -> UnwrappedInfo | None:
        """Return what was read of the largest unwrapped model inside this one; None if there is none."""
        modules = {id(module) for module in model.modules()}
        infos = [info for key, info in self._unwrapped_by_id().items() if key in modules]
        return max(infos, key=lambda info: len(info.parameters), default=None)

    def model_of(self, optimizer: Any) -> Module | None:
        """Return the largest model of which the optimizer holds a parameter; if it holds none, or is None, the largest."""
        optimized: set[int] = set()
        if optimizer is not None:
            for group in optimizer.param_groups:
                optimized.update(id(parameter) for parameter in group["params"])
        models = _alive(self.models)
        trained = [model for model in models if not optimized.isdisjoint(_parameter_ids(model))]
        return max(trained or models, key=lambda model: len(list(model.modules())), default=None)

    def wrapper_of(self, optimizer: Any) -> Any:
        """Return the trainer's wrapper of that torch optimizer, or the optimizer itself if no wrapper was seen."""
        from pytest_distcompat.probe.optimizer import torch_optimizer

        for wrapper in reversed(_alive(self.optimizers)):
            if torch_optimizer(wrapper) is optimizer:
                return wrapper
        return optimizer

    def last_optimizer(self) -> Any:
        """Return the optimizer that the trainer wrapped last, None if there is none."""
        return _last_alive(self.optimizers)

    def last_torch_optimizer(self) -> Any:
        """Return torch's own optimizer that was made last, None if there is none."""
        return _last_alive(self.torch_optimizers)

    def optimizers_with(self, optimizer: Any, model: Module | None) -> Any:
        """Return the optimizer, or a list of it and all others that train the model, in the order they were made."""
        from pytest_distcompat.probe.optimizer import entries, torch_optimizer

        given = torch_optimizer(optimizer)
        candidates = [
            candidate
            for candidate in _alive(self.torch_optimizers)
            if hasattr(candidate, "param_groups")
        ]
        of_model: set[int] = set()
        if model is not None:
            of_model = _parameter_ids(model)
        optimized = {id(parameter) for parameter in entries(given)}
        chosen = [given]
        # The latest come first: an optimizer that was dropped holds the same parameters as the one that replaced it.
        for candidate in reversed(candidates):
            parameters = {id(parameter) for parameter in entries(candidate)}
            if parameters & of_model and not parameters & optimized:
                chosen.append(candidate)
                optimized |= parameters
        if len(chosen) == 1:
            return self.wrapper_of(optimizer)
        order = {id(candidate): index for index, candidate in enumerate(candidates)}
        chosen.sort(key=lambda candidate: order.get(id(candidate), -1))
        return [self.wrapper_of(candidate) for candidate in chosen]

    def schedulers_of(self, optimizer: Any) -> Any:
        """Return the scheduler of that optimizer, None if it has none; for a list of optimizers a list of schedulers."""
        if not isinstance(optimizer, list):
            return self._scheduler_of(optimizer)
        schedulers: list[Any] = []
        for each in optimizer:
            scheduler = self.schedulers_of(each)
            if scheduler is not None:
                schedulers.append(scheduler)
        return schedulers

    def _scheduler_of(self, optimizer: Any) -> Any:
        """Return the scheduler of that optimizer that was made last, None if it has none."""
        from pytest_distcompat.probe.optimizer import torch_optimizer

        stepping = torch_optimizer(optimizer)
        for scheduler in reversed(_alive(self.schedulers)):
            if torch_optimizer(scheduler.optimizer) is stepping:
                return scheduler
        return None

    def accelerator_attribute(self, name: str) -> Any:
        """Return an attribute of the script's Accelerator, None without one."""
        if self.accelerator is None:
            return None
        return getattr(self.accelerator(), name, None)


def _parameter_ids(model: Module) -> set[int]:
    """Return the ``id`` of each parameter of the model."""
    return {id(parameter) for parameter in model.parameters()}
