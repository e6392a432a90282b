"""Models, optimizers and schedulers that a script makes, and which of them belong together.

The *probe*, the code that records an unmodified script from inside each rank (process that trains),
has one ``TrackedObjects`` in its ``Recorder``. The wrappers of library calls add to it:
``AdamW(...)`` adds an optimizer, ``FSDP(model)`` a model. When the script steps an optimizer, the
recorder asks which model that trains, what the model was before anything wrapped it, and which
scheduler belongs to the optimizer. Nobody tells the probe, so it compares the parameters: a model
belongs to an optimizer that has some of its parameters. The *unwrapped* model is the model before
DDP, FSDP or DeepSpeed wraps it.
"""

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
    """A model, and what was read of it before DDP, FSDP or DeepSpeed wrapped it."""

    model: weakref.ref[Module]
    #: Its names, shapes and the like.
    info: UnwrappedInfo


def _alive(references: Iterable[weakref.ref[_T]]) -> list[_T]:
    """Return the objects that still exist, in order."""
    objects: list[_T] = []
    for reference in references:
        referent = reference()
        if referent is not None:
            objects.append(referent)
    return objects


def _last_alive(references: Iterable[weakref.ref[Any]]) -> Any:
    """Return the last object that still exists, None if there is none."""
    objects = _alive(references)
    return objects[-1] if objects else None


class TrackedObjects:
    """The models, optimizers and schedulers that one rank has made so far.

    They are kept by weak references, so that the script can drop them.

    Args:
        blocks: Class names of the modules to wrap one by one; empty for those that a model
            declares.
    """

    def __init__(self, blocks: tuple[str, ...] = ()) -> None:
        self._blocks = blocks
        #: What calls such as ``FSDP(model)`` or ``Accelerator.prepare`` have wrapped, in order.
        self.models: list[weakref.ref[Module]] = []
        #: The optimizers that such calls have returned, as accelerate's ``AcceleratedOptimizer``.
        self.optimizers: list[weakref.ref[Any]] = []
        #: torch's learning rate schedulers, in the order they were made.
        self.schedulers: list[weakref.ref[Any]] = []
        #: torch's own optimizers, wrapped or not, in the order they were made.
        self.torch_optimizers: list[weakref.ref[Any]] = []
        #: The ``Accelerator`` that last prepared something; None without one.
        self.accelerator: weakref.ref[Any] | None = None
        #: The ``id`` of a model before it was wrapped -> what was read of it. An entry whose model
        #: is gone is stale: another object may have that ``id`` now.
        self._unwrapped: dict[int, _UnwrappedModel] = {}

    def read_unwrapped(self, model: Module) -> None:
        """Read a model that is about to be wrapped, unless it was read before.

        Modules inside it that are wrapped already are taken as they were before that: a script may
        call ``fully_shard`` for each block, and then for the model.
        """
        from pytest_distcompat.probe.blocks import unwrapped
        from pytest_distcompat.probe.parts import read_parts

        # Without the wrappers of torch that it may be in: DDP, FSDP, torch.compile.
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
        """Return what was read of the largest unwrapped model inside this one, or None.

        Inside a wrapped model are its blocks too, each of which may have been read by itself.
        """
        modules = {id(module) for module in model.modules()}
        infos = []
        for module_id, info in self._unwrapped_by_id().items():
            if module_id in modules:
                infos.append(info)
        return max(infos, key=_number_of_parameters, default=None)

    def model_of(self, optimizer: Any) -> Module | None:
        """Return the largest model that the optimizer trains, by its number of modules.

        If it trains none of the models, or is None, the largest of all models is returned.
        """
        #: The ``id`` of each parameter that the optimizer has.
        optimized: set[int] = set()
        if optimizer is not None:
            for group in optimizer.param_groups:
                optimized.update(id(parameter) for parameter in group["params"])
        models = _alive(self.models)
        trained = []
        for model in models:
            if not optimized.isdisjoint(_parameter_ids(model)):
                trained.append(model)
        return max(trained or models, key=_number_of_modules, default=None)

    def wrapper_of(self, optimizer: Any) -> Any:
        """Return what wraps a torch optimizer in the trainer, or else the optimizer itself."""
        from pytest_distcompat.probe.wrapped_optimizers import torch_optimizer

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
        """Return all optimizers that train the model together with this one.

        Returns:
            The optimizer, if it is the only one; else a list of all in the order they were made.
            Each is as the trainer wraps it.
        """
        from pytest_distcompat.probe.wrapped_optimizers import entries, torch_optimizer

        # The optimizer of torch inside all wrappers.
        given = torch_optimizer(optimizer)
        model_parameters: set[int] = set()
        if model is not None:
            model_parameters = _parameter_ids(model)
        candidates = self._optimizers_with_groups()
        chosen = [given]
        # By the tensors in its param groups.
        optimized = {id(parameter) for parameter in entries(given)}
        # An optimizer counts if it has parameters of the model that no chosen one has. The latest
        # come first, because an optimizer that another one replaced may still exist, with the same
        # parameters.
        for candidate in reversed(candidates):
            parameters = {id(parameter) for parameter in entries(candidate)}
            if parameters & model_parameters and not parameters & optimized:
                chosen.append(candidate)
                optimized |= parameters
        if len(chosen) == 1:
            return self.wrapper_of(optimizer)
        order = {id(candidate): index for index, candidate in enumerate(candidates)}

        def position(candidate: Any) -> int:
            """Return when the optimizer was made; one that is no candidate comes first."""
            return order.get(id(candidate), -1)

        chosen.sort(key=position)
        return [self.wrapper_of(candidate) for candidate in chosen]

    def _optimizers_with_groups(self) -> list[Any]:
        """Return torch's own optimizers, without those whose constructor has not finished."""
        optimizers: list[Any] = []
        for optimizer in _alive(self.torch_optimizers):
            if hasattr(optimizer, "param_groups"):
                optimizers.append(optimizer)
        return optimizers

    def schedulers_of(self, optimizer: Any) -> Any:
        """Return the scheduler of an optimizer, or None; for a list of optimizers, a list."""
        if not isinstance(optimizer, list):
            return self._scheduler_of(optimizer)
        schedulers: list[Any] = []
        for each in optimizer:
            scheduler = self.schedulers_of(each)
            if scheduler is not None:
                schedulers.append(scheduler)
        return schedulers

    def _scheduler_of(self, optimizer: Any) -> Any:
        """Return the scheduler of an optimizer that was made last, None if there is none."""
        from pytest_distcompat.probe.wrapped_optimizers import torch_optimizer

        stepping = torch_optimizer(optimizer)
        for scheduler in reversed(_alive(self.schedulers)):
            if torch_optimizer(scheduler.optimizer) is stepping:
                return scheduler
        return None

    def accelerator_attribute(self, name: str) -> Any:
        """Return an attribute of the script's Accelerator, None without one."""
        if self.accelerator is None:
            return None
        # The reference returns None for an Accelerator that is gone, which has no such attribute.
        return getattr(self.accelerator(), name, None)


def _parameter_ids(model: Module) -> set[int]:
    """Return the ``id`` of each parameter of the model."""
    return {id(parameter) for parameter in model.parameters()}


def _number_of_parameters(info: UnwrappedInfo) -> int:
    return len(info.parameters)


def _number_of_modules(model: Module) -> int:
    return len(list(model.modules()))
