"""Turns what an unmodified script does into the snapshots that a driver's methods would have left.

A script has no actions. What it calls anyway is told by ``points``: a model is about to be wrapped, an optimizer has stepped,
a checkpoint was written. From that: ``plain`` (the model before anything wrapped it), ``build`` (just before the first
step, when nothing has moved yet), ``step`` (told when the next thing begins, for by then its scheduler has stepped too),
``save`` and ``load``. The place of a snapshot follows from how many steps were taken, not from how many snapshots there were,
so that ranks agree on it though one of them may save alone.

It takes part in no collective, changes nothing, and is never an error of the script's: whatever calls it goes through
``guard``.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.scripts import guard
from pytest_distcompat.scripts.hosted_rank import HostedRank, before_end
from pytest_distcompat.scripts.probe_config import ProbeConfig
from pytest_distcompat.scripts.stopping import leave_together
from pytest_distcompat.scripts.subjects import Subjects
from pytest_distcompat.trace import Snapshot

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

#: Places in the run between two steps.
STRIDE = 100
BUILD_MODEL, BUILD, LOAD, SAVE, END = 0, 1, 2, 10, 90


class Recorder:
    """What one rank's probe knows of the training that it is put into."""

    def __init__(self, rank: HostedRank, config: ProbeConfig) -> None:
        from pytest_distcompat.probe import Observer

        self.rank, self.config = rank, config
        self.observer = Observer(guard.guarded)
        self.device = (
            config.device if config.device == "cpu" else f"{config.device}:{os.environ.get('LOCAL_RANK', '0')}"
        )
        self.steps = 0
        self.depth = self._quiet = 0
        self.subjects = Subjects(config.blocks)
        self._root: weakref.ref[Module] | None = None
        self._model: weakref.ref[Module] | None = None
        #: Inside of an engine's step the model is not what it is before and after.
        self.in_engine = False
        self._optimizer: Any = None
        self._hooks: list[Any] = []
        self._losses: list[torch.Tensor] = []
        self._pending: dict[str, Any] | None = None
        self._loaded = False
        #: What a checkpoint left in a model that was not trained since: the snapshots to be told if it never is.
        self._at_rest: dict[str, dict[str, Any]] = {}
        self._built = self._grouped = False
        self._saves = 0
        self._settled_at = -1
        self._stops = False
        self._listen()
        before_end(self._leave)

    def _leave(self) -> None:
        from torch import distributed

        self.aside(self.close)
        for action, infos in {} if self._built else self._at_rest.items():
            self._tell(action, {"build_model": BUILD_MODEL, "load": LOAD}[action], **infos)
        # Without its group a rank of ZeRO-3 cannot tell which part of a parameter is its own; it was looked at before that.
        if not self._grouped or distributed.is_initialized():
            self.aside(self.settled)

    @property
    def whole(self) -> bool:
        """Whether the step that goes on is looked at in full."""
        return self.steps < self.config.steps

    def aside(self, function: Callable[..., None], *args: Any) -> None:
        """Call what is ours in the midst of what is not: what it computes is no business of the script's."""
        if self.rank.here():
            with self.observer.aside():
                function(*args)

    @contextlib.contextmanager
    def inside(self, *, training: bool = False) -> Iterator[bool]:
        """Inside a call that is a point; whether it is the outermost, for what a library does inside is its own business.

        Only a call that is ``training`` computes gradients or steps. In the others an optimizer may step too, on nothing: to
        have a state that can be saved or filled (``torch.distributed.checkpoint.state_dict``).
        """
        outermost = self.depth == 0
        self.depth += 1
        self._quiet += not training
        self._listen()
        try:
            with self.observer.operators() if training and outermost else contextlib.nullcontext():
                yield outermost
        finally:
            self.depth -= 1
            self._quiet -= not training
            self._listen()

    def _listen(self) -> None:
        self.observer.listen(on=self.whole and not self._quiet)

    # Models.

    def about_to_wrap(self, model: Module) -> None:
        """A model is what its author made, for the last time."""
        self.subjects.see_unwrapped(model)

    def made(self, value: Any) -> None:
        """A model or an optimizer as the trainer has it, until something is wrapped around it."""
        import torch

        from pytest_distcompat.probe.observe import Hook

        if isinstance(value, torch.nn.Module):
            self.subjects.models.append(weakref.ref(value))
            # Before FSDP's own hook: what a rank is fed, not what its shard of the model gets.
            watched = guard.guarded("a forward pre-hook of a model", self._forward)

            def hook(*given: Any) -> None:
                if not torch.compiler.is_compiling():
                    watched(*given)

            self._hooks.append(value.register_forward_pre_hook(Hook(hook), prepend=True, with_kwargs=True))
        elif hasattr(value, "param_groups"):
            self.subjects.optimizers.append(weakref.ref(value))

    def compiled(self) -> None:
        """No hook of ours may lie in what is to be compiled: it would break the graph."""
        while self._hooks:
            self._hooks.pop().remove()

    def _forward(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """A model that somebody wrapped computes. The first that does in training is the outermost one.

        torch goes through a copy of the hooks, but looks up at the call whether one takes keyword arguments: one that was
        taken off meanwhile, by an earlier hook, gets none.
        """
        import torch

        if kwargs is None or not (torch.is_grad_enabled() and module.training):
            return
        if self._root is None and any(parameter.requires_grad for parameter in module.parameters()):
            self._root = weakref.ref(module)
            self.aside(self._attach, module)
        if self._root is not None and self._root() is module:
            self.aside(self._begin, module, args, kwargs)

    def _attach(self, module: Module) -> None:
        """Look at single products from now on, unless that would be inside of a graph."""
        from pytest_distcompat.probe.blocks import unwrapped
        from pytest_distcompat.probe.live import compiled_modules

        if self.whole and not any(compiled_modules(module)):
            self._hooks += self.observer.attach_to_products(unwrapped(module))

    def _begin(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._go_on()
        self.observer.fed(module, args, kwargs)

    # Steps.

    def backward(self, loss: object) -> None:
        """Gradients of that loss are about to be computed."""
        import torch

        self._go_on()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())

    def about_to_step(self, optimizer: Any, engine: Any = None) -> None:
        """The optimizer, or the engine that has it, is about to step: before the first time, all is built and nothing moved."""
        if self._built or self._quiet or (self.in_engine and engine is None):
            return
        from torch import distributed

        self._built, self._grouped = True, distributed.is_available() and distributed.is_initialized()
        model = engine if engine is not None else self.subjects.model_of(optimizer)
        self._optimizer = engine.optimizer if engine is not None else self.subjects.together(optimizer, model)
        if model is None:
            self.rank.log.write("unseen model", optimizer=type(optimizer).__name__)
            return
        self._model = weakref.ref(model)
        self._tell("build_model", BUILD_MODEL, unwrapped=self.subjects.unwrapped_of(model))
        infos = self._look(whole=True)
        self._tell("build", BUILD, **infos)
        if self._loaded:
            self._loaded = False
            self._tell("load", self.steps * STRIDE + LOAD, **infos)

    def stepped(self) -> None:
        """An optimizer, or the engine, has stepped. What else belongs to the step (the scheduler) is seen when it is told."""
        if self._model is not None and not self.in_engine and not self._quiet:
            self._pending = self._look(whole=self.whole)

    def close(self) -> None:
        """Tell of the step that was taken, if it was not told of yet."""
        if self._pending is None:
            return
        infos, self._pending = self._pending, None
        losses, self._losses = self._losses, []
        loss = sum(float(one) for one in losses) / len(losses) if losses else None
        from pytest_distcompat.probe import read_scheduler

        if self.whole:
            infos |= self.observer.infos()
        self._tell(
            "step",
            (self.steps + 1) * STRIDE,
            **infos | {"loss": loss, "scheduler": read_scheduler(self.subjects.schedulers_of(self._optimizer))},
        )
        self.observer.restart()
        self.steps += 1
        self._saves = 0
        if not self.whole:
            self._listen()
            if self._root is not None:
                self.compiled()

    # Checkpoints.

    @property
    def _place(self) -> int:
        return self.steps * STRIDE + SAVE + 2 * self._saves

    def about_to_save(self, everyone: bool) -> None:
        """A checkpoint is about to be written."""
        self.close()
        if everyone:
            self.rank.log.write("action", action="save", index=self._place)

    def saved(self, path: Any, everyone: bool, model: bool) -> None:
        """A checkpoint was written; ``everyone``: by all ranks together; ``model``: the model is to be in it."""
        place = self._place
        self.rank.log.write("saved", path=str(Path(path).resolve()), index=place, everyone=everyone, model=model)
        if everyone and self._model is not None:
            self._saves += 1
            self._tell("save", place, **self._look(whole=True))
            self._stops = self.steps == self.config.stop_after

    def _go_on(self) -> None:
        self.close()
        if self._stops:
            leave_together(self.rank)

    def loaded(self) -> None:
        """A checkpoint was read, maybe a part of it: what counts is what is there when training begins, or if it never does."""
        self.close()
        if self._built and self._model is not None:
            self._tell("load", self.steps * STRIDE + LOAD, **self._look(whole=True))
        else:
            self._loaded = True
            last = self.subjects.last_optimizer()
            model = self.subjects.model_of(last)
            self._optimizer = self.subjects.together(last, model) if last is not None else None
            if model is not None:
                self._model = weakref.ref(model)
                self._at_rest = {
                    "build_model": {"unwrapped": self.subjects.unwrapped_of(model)},
                    "load": self._look(whole=True),
                }

    def settled(self) -> None:
        """Training may be over: what is trained is looked at once more, if it was not since the last step."""
        self.close()
        model = self._model() if self._model is not None else None
        if model is not None and self._settled_at != self.steps:
            self._settled_at = self.steps
            self._tell("export", self.steps * STRIDE + END, **self._look(whole=True))

    def _look(self, *, whole: bool) -> dict[str, Any]:
        from pytest_distcompat.probe.snapshot import look

        model = self._model() if self._model is not None else None
        if model is None:
            return {}
        size = self.subjects.of_accelerator("num_processes") or getattr(model, "world_size", None)
        return look(
            model,
            self._optimizer,
            device=self.device,
            scheduler=self.subjects.schedulers_of(self._optimizer),
            scaler=self.subjects.of_accelerator("scaler"),
            trainer_world_size=size if isinstance(size, int) else None,
            whole=whole,
        )

    def _tell(self, action: str, index: int, **infos: Any) -> None:
        snapshot = Snapshot(self.rank.rank, "train", action, index, **infos)
        self.rank.log.write("snapshot", action=action, index=index, snapshot=snapshot.to_json())
