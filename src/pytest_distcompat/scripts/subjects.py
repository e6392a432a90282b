"""The models, optimizers and schedulers that the points of a script have shown, and which of them belong together.

All are held weakly: what the script lets go of is to be gone.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.trace import UnwrappedInfo


class Subjects:
    """What was seen so far in one rank. ``blocks``: class names of the models' blocks; if none, what the models declare."""

    def __init__(self, blocks: tuple[str, ...] = ()) -> None:
        self._blocks = blocks
        self.models: list[weakref.ref[Module]] = []
        self.optimizers: list[weakref.ref[Any]] = []
        self.schedulers: list[weakref.ref[Any]] = []
        #: Torch's own, in the order they were made; ``optimizers`` are as a trainer has them.
        self.made: list[weakref.ref[Any]] = []
        self.accelerator: weakref.ref[Any] | None = None
        self._unwrapped: dict[int, tuple[weakref.ref[Module], UnwrappedInfo]] = {}

    def see_unwrapped(self, model: Module) -> None:
        """Read a model that is about to be wrapped, once; of its parts that were wrapped before, what they were then counts."""
        from pytest_distcompat.probe.blocks import unwrapped
        from pytest_distcompat.probe.parts import read_parts

        model = unwrapped(model)
        known = {key: info for key, (there, info) in self._unwrapped.items() if there() is not None}
        if id(model) not in known:
            self._unwrapped[id(model)] = weakref.ref(model), read_parts(model, known, self._blocks)

    def unwrapped_of(self, model: Module) -> UnwrappedInfo | None:
        """Of the models that were seen unwrapped, the largest inside of this one."""
        inside = {id(module) for module in model.modules()}
        found = [info for key, (there, info) in self._unwrapped.items() if key in inside and there() is not None]
        return max(found, key=lambda info: len(info.parameters), default=None)

    def model_of(self, optimizer: Any) -> Module | None:
        """The largest model of which the optimizer holds a parameter; where it is stale, or None, the largest there is."""
        groups = optimizer.param_groups if optimizer is not None else ()
        held = {id(parameter) for group in groups for parameter in group["params"]}
        alive = [model for there in self.models if (model := there()) is not None]
        theirs = [model for model in alive if any(id(parameter) in held for parameter in model.parameters())]
        return max(theirs or alive, key=lambda model: sum(1 for _ in model.modules()), default=None)

    def outermost(self, optimizer: Any) -> Any:
        """The trainer's own wrapper of that optimizer, if a point has shown it."""
        from pytest_distcompat.probe import torch_optimizer

        known = [there() for there in self.optimizers]
        return next(
            (one for one in reversed(known) if one is not None and torch_optimizer(one) is optimizer), optimizer
        )

    def last_optimizer(self) -> Any:
        """The one that the trainer made last, None if there is none."""
        alive = [one for there in self.optimizers if (one := there()) is not None]
        return alive[-1] if alive else None

    def together(self, optimizer: Any, model: Module | None) -> Any:
        """The optimizer; or all that train the model beside it, in the order they were made, each as it is wrapped.

        Beside it: what holds parameters of that model, and none that one of them holds already, those made last first. A
        wrapper that this does not know, or one that was made and forgotten, holds the same ones.
        """
        from pytest_distcompat.probe.optimizer import entries, torch_optimizer

        inner = torch_optimizer(optimizer)
        known = [one for there in self.made if (one := there()) is not None and hasattr(one, "param_groups")]
        live = {id(parameter) for parameter in model.parameters()} if model is not None else set()
        held = {id(parameter) for parameter in entries(inner)}
        chosen = [inner]
        for one in reversed(known):
            own = {id(parameter) for parameter in entries(one)}
            if own & live and not own & held:
                chosen.append(one)
                held |= own
        if len(chosen) == 1:
            return self.outermost(optimizer)
        places = {id(one): place for place, one in enumerate(known)}
        return [self.outermost(one) for one in sorted(chosen, key=lambda one: places.get(id(one), -1))]

    def schedulers_of(self, optimizer: Any) -> Any:
        """What steers that optimizer, None if nothing does; of several, those of each."""
        from pytest_distcompat.probe.optimizer import torch_optimizer

        if isinstance(optimizer, list):
            return [one for each in optimizer if (one := self.schedulers_of(each)) is not None]
        inner = torch_optimizer(optimizer)
        for there in reversed(self.schedulers):
            scheduler = there()
            if scheduler is not None and torch_optimizer(scheduler.optimizer) is inner:
                return scheduler
        return None

    def of_accelerator(self, name: str) -> Any:
        """An attribute of the script's Accelerator, None without one."""
        return getattr(self.accelerator() if self.accelerator is not None else None, name, None)
