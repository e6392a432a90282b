"""Recorder of snapshots in an unmodified script, as the methods of a driver would have left them.

``wrappers`` report the script's library calls. Of these the recorder makes snapshots of
``build_model`` (before anything wraps the model), ``build`` (just before the first step), ``step``
(when the next call begins, because only then the scheduler has stepped too), ``save``, ``load`` and
``export``. A snapshot's index follows from the number of steps, so that ranks agree on it although
one of them may save alone. The recorder takes part in no collective and changes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_distcompat import clock
from pytest_distcompat.decode import encode
from pytest_distcompat.ext.scripts import guard
from pytest_distcompat.ext.scripts.environment import ProbeConfig
from pytest_distcompat.ext.scripts.hosted_rank import HostedRank
from pytest_distcompat.ext.scripts.named_states import NamedStates
from pytest_distcompat.ext.scripts.tracked_objects import TrackedObjects
from pytest_distcompat.trace import Snapshot, Sums

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.events import Event

_E = TypeVar("_E", bound="Event")

#: The distance between the snapshot indices of two steps.
STRIDE = 100
#: The offsets of the snapshots between them.
BUILD_MODEL = 0
BUILD = 1
LOAD = 2
SAVE = 10
END = 90


class Recorder:
    """State of the probe in one rank of a script."""

    def __init__(self, rank: HostedRank, config: ProbeConfig) -> None:
        from pytest_distcompat.probe.observe import Observer

        self.rank = rank
        self.config = config
        self.observer = Observer(guard.guarded)
        self.device = config.device
        if config.device != "cpu":
            local_rank = os.environ.get("LOCAL_RANK", "0")
            self.device = f"{config.device}:{local_rank}"
        #: The optimizer steps that are finished.
        self.steps = 0
        #: How many wrapped calls are going on, one inside the other, and how many of them do not
        #: train.
        self.depth = 0
        self._ignored_depth = 0
        self.tracked = TrackedObjects(config.blocks)
        self.states = NamedStates(config.extra_state)
        #: The outermost module that computes in training, whose inputs are recorded.
        self._root: weakref.ref[Module] | None = None
        #: The model that is trained, as the trainer wrapped it.
        self._model: weakref.ref[Module] | None = None
        #: The model since its last step: a script whose ``main`` returns has none when the process
        #: ends. Its optimizer is held anyway, and with it the parameters.
        self._trained_model: Module | None = None
        #: True inside a step of a DeepSpeed engine, where the model is in an intermediate state.
        self.in_engine = False
        self._optimizer: Any = None
        self._hooks: list[Any] = []
        self._losses: list[torch.Tensor] = []
        #: Fields of the snapshot of the last step, until ``finish_step`` writes it.
        self._pending: dict[str, Any] | None = None
        #: Whether a checkpoint was loaded before the first step.
        self._loaded = False
        #: Action -> fields of the snapshots after a load, written only if the loaded model is never
        #: trained.
        self._untrained_snapshots: dict[str, dict[str, Any]] = {}
        #: Whether the first step has begun, and whether there was a process group then.
        self._built = False
        self._had_process_group = False
        #: The checkpoints since the last step.
        self._saves = 0
        #: The number of steps after which the trained model was recorded last.
        self._final_recorded_at = -1
        self._should_stop = False
        #: Whether this rank alone has written a file after the last step.
        self._wrote_file = False
        #: Whether the ranks have compared what they wrote after the step at which the run may be
        #: stopped.
        self._compared = False
        #: Whether the script has read a file of ``torch.save``.
        self._read_file = False
        self._update_observer()
        rank.before_end = self._before_end

    def _before_end(self) -> None:
        from torch import distributed

        self.call_unobserved(self.finish_step)
        # Without its process group a rank of ZeRO-3 does not know its shards; it was recorded
        # before the group was destroyed.
        if not self._had_process_group or distributed.is_initialized():
            self.call_unobserved(self.record_final_model)
        if not self._built:
            offset_by_action = {"build_model": BUILD_MODEL, "load": LOAD}
            for action, fields in self._untrained_snapshots.items():
                self._write_snapshot(action, offset_by_action[action], **fields)
        self._trained_model = None

    @property
    def in_full(self) -> bool:
        """Tell whether the current step is recorded in full."""
        return self.steps < self.config.steps

    def call_unobserved(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function of the probe in the middle of the script.

        What the function computes is not observed.
        """
        if self.rank.is_this_process():
            with self.observer.aside():
                function(*args)

    @contextlib.contextmanager
    def inside_call(self, *, training: bool = False) -> Iterator[bool]:
        """Mark the time inside a wrapped call.

        Yield whether it is the outermost one, which is the script's own.

        Only calls in ``training`` compute gradients or step:
        ``torch.distributed.checkpoint.state_dict`` steps without gradients to create optimizer
        state.
        """
        outermost = self.depth == 0
        self.depth += 1
        self._ignored_depth += not training
        self._update_observer()
        recording: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if training and outermost:
            recording = self.observer.recording_operators()
        try:
            with recording:
                yield outermost
        finally:
            self.depth -= 1
            self._ignored_depth -= not training
            self._update_observer()

    def _update_observer(self) -> None:
        self.observer.active = self.in_full and not self._ignored_depth

    # Models.

    def after_wrap(self, value: Any) -> None:
        """Track a model or an optimizer that a call has wrapped."""
        import torch

        from pytest_distcompat.probe.observe import Hook

        if isinstance(value, torch.nn.Module):
            # A script that goes on to another model may have left the last one.
            self._trained_model = None
            self.tracked.models.append(weakref.ref(value))
            # Before FSDP's own hook, to see the inputs of the rank and not those of its shard of
            # the model.
            guarded = guard.guarded("a forward pre-hook of a model", self._forward)

            def hook(*arguments: Any) -> None:
                if not torch.compiler.is_compiling():
                    guarded(*arguments)

            self._hooks.append(
                value.register_forward_pre_hook(Hook(hook), prepend=True, with_kwargs=True)
            )
        elif hasattr(value, "param_groups"):
            self.tracked.optimizers.append(weakref.ref(value))

    def remove_hooks(self) -> None:
        """Remove the probe's hooks from modules.

        In a module that is compiled they would break the graph.
        """
        while self._hooks:
            self._hooks.pop().remove()

    def _forward(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Record the inputs of the outermost model.

        It is the first wrapped model that computes in training.
        """
        # ``kwargs`` is None if an earlier hook of the same call removed this one: torch iterates
        # over a copy of the hooks.
        import torch

        if kwargs is None or not (torch.is_grad_enabled() and module.training):
            return
        if self._root is None and _is_trainable(module):
            self._root = weakref.ref(module)
            self.call_unobserved(self._attach, module)
        if self._root is not None and self._root() is module:
            self.call_unobserved(self._before_forward, module, args, kwargs)

    def _attach(self, module: Module) -> None:
        """Register hooks on the layers of the model, unless a part of it is compiled."""
        from pytest_distcompat.probe.blocks import unwrapped
        from pytest_distcompat.probe.live import compiled_modules

        if self.in_full and not any(compiled_modules(module)):
            self._hooks += self.observer.attach_to_layers(unwrapped(module))

    def _before_forward(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._end_step_or_stop()
        self.observer.record_inputs(module, args, kwargs)

    # Steps.

    def before_backward(self, loss: object) -> None:
        """Record the loss, before its gradients are computed."""
        import torch

        self._end_step_or_stop()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())

    def before_step(self, optimizer: Any, engine: Any = None) -> None:
        """Record the built model before the first step.

        It is a step of the optimizer, or of the DeepSpeed engine that has the optimizer.
        """
        if self._built or self._ignored_depth or (self.in_engine and engine is None):
            return
        from torch import distributed

        self._built = True
        self._had_process_group = distributed.is_available() and distributed.is_initialized()
        if engine is not None:
            model = engine
            self._optimizer = engine.optimizer
        else:
            model = self.tracked.model_of(optimizer)
            self._optimizer = self.tracked.optimizers_with(optimizer, model)
        if model is None:
            from pytest_distcompat.ext.scripts.events import UnseenModel

            self.rank.log.write(UnseenModel(type(optimizer).__name__))
            return
        self._model = weakref.ref(model)
        self._write_snapshot("build_model", BUILD_MODEL, unwrapped=self.tracked.unwrapped_of(model))
        fields = self._read_fields(whole=True) | self._read_states(known=True)
        self._write_snapshot("build", BUILD, **fields)
        if self._loaded:
            self._loaded = False
            self._write_snapshot("load", self._index(LOAD), **fields)

    def after_step(self) -> None:
        """Read the model after a step of the optimizer or engine.

        ``finish_step`` adds the scheduler, which steps later.
        """
        if self._model is not None and not self.in_engine and not self._ignored_depth:
            self._pending = self._read_fields(whole=self.in_full)
            self._trained_model = self._model()

    def finish_step(self) -> None:
        """Write the snapshot of the last step, if it is not written yet."""
        if self._pending is None:
            return
        from pytest_distcompat.probe.optimizer import read_scheduler

        fields = self._pending
        self._pending = None
        if self.in_full:
            # Not when the optimizer has stepped: the script moves an average after that.
            fields |= self.observer.infos() | self._read_states(known=False)
        fields["loss"] = self._mean_loss()
        fields["scheduler"] = read_scheduler(self.tracked.schedulers_of(self._optimizer))
        self._losses = []
        self._write_snapshot("step", (self.steps + 1) * STRIDE, **fields)
        self.observer.restart()
        self.steps += 1
        self._saves = 0
        self._wrote_file = False
        if not self.in_full:
            self._update_observer()
            if self._root is not None:
                self.remove_hooks()

    def _mean_loss(self) -> float | None:
        """Return the mean of the losses since the last step, one for each micro-batch.

        None without any.
        """
        if not self._losses:
            return None
        losses = [float(loss) for loss in self._losses]
        return sum(losses) / len(losses)

    # Checkpoints.

    def before_save(self, everyone: bool) -> None:
        """Log that a checkpoint is about to be written, if ``everyone`` writes a part of it."""
        self.finish_step()
        if everyone:
            from pytest_distcompat.events import Action

            index = self._index(SAVE + 2 * self._saves)
            self.rank.log.write(Action("save", index))

    def after_save(self, path: Any, everyone: bool, model: bool) -> None:
        """Record a checkpoint that ``everyone`` has written, or a file of one rank.

        ``model`` says that it should hold the model.
        """
        from pytest_distcompat.ext.scripts.events import Saved

        index = self._index(SAVE + 2 * self._saves)
        resolved = str(Path(path).resolve())
        self.rank.log.write(Saved(resolved, index, everyone, model))
        self._wrote_file = self._wrote_file or not everyone
        if everyone and self._model is not None:
            self._saves += 1
            fields = self._read_fields(whole=True) | self._read_states(known=True)
            self._write_snapshot("save", index, **fields)
            self._should_stop = self.steps == self.config.stop_after

    def _end_step_or_stop(self) -> None:
        self.finish_step()
        if self.steps == self.config.stop_after and not self._compared:
            self._compared = True
            # Ranks that wrote nothing learn here that another one has.
            self._should_stop = self._should_stop or anyone_wrote(self.rank, self._wrote_file)
        if self._should_stop:
            exit_together(self.rank)

    def after_file_load(self) -> None:
        """Note that a file was read.

        What of it reaches the model shows before the first step, or at the end.
        """
        self.finish_step()
        self._read_file = True

    def after_load(self) -> None:
        """Record a loaded checkpoint.

        Before the first step parts of it may follow, so that it is recorded at that step, or at the
        end.
        """
        self.finish_step()
        if self._built and self._model is not None:
            fields = self._read_fields(whole=True) | self._read_states(known=True)
            self._write_snapshot("load", self._index(LOAD), **fields)
        else:
            self._loaded = True
            self._read_untrained(self.tracked.last_optimizer())

    def _read_untrained(self, optimizer: Any) -> None:
        """Read the loaded model and its optimizer, if there are any.

        It is for a run that may never train them.
        """
        model = self.tracked.model_of(optimizer)
        self._optimizer = None
        if optimizer is not None:
            self._optimizer = self.tracked.optimizers_with(optimizer, model)
        if model is not None:
            self._model = weakref.ref(model)
            unwrapped = {"unwrapped": self.tracked.unwrapped_of(model)}
            self._untrained_snapshots = {
                "build_model": unwrapped,
                "load": self._read_fields(whole=True),
            }

    def record_final_model(self) -> None:
        """Record the trained model when training may be over, once after each step."""
        self.finish_step()
        if self._read_file and not self._built and self._final_recorded_at != self.steps:
            # A file is read before its parts are loaded, so that the model shows them now.
            self._read_untrained(
                self.tracked.last_optimizer() or self.tracked.last_torch_optimizer()
            )
        model = self._live_model()
        if model is not None and self._final_recorded_at != self.steps:
            self._final_recorded_at = self.steps
            from pytest_distcompat.probe.snapshot import read_sums

            sums: dict[str, Sums] = {}
            # A quantized tensor may have no arithmetic.
            with contextlib.suppress(NotImplementedError, RuntimeError, TypeError):
                sums = read_sums(model)
            self._write_snapshot(
                "export", self._index(END), sums=sums, **self._read_fields(whole=True)
            )

    def _live_model(self) -> Module | None:
        """Return the model that is trained.

        None if there is none yet, or the script has dropped it.
        """
        return self._model() if self._model is not None else None

    def _read_fields(self, *, whole: bool) -> dict[str, Any]:
        """Return the fields of a snapshot of the model and its optimizer.

        ``whole`` adds the digests of all values.
        """
        from pytest_distcompat.probe.snapshot import read_snapshot_fields

        model = self._live_model()
        if model is None:
            return {}
        world_size = self.tracked.accelerator_attribute("num_processes")
        world_size = world_size or getattr(model, "world_size", None)
        if not isinstance(world_size, int):
            world_size = None
        return read_snapshot_fields(
            model,
            self._optimizer,
            device=self.device,
            scheduler=self.tracked.schedulers_of(self._optimizer),
            scaler=self.tracked.accelerator_attribute("scaler"),
            trainer_world_size=world_size,
            whole=whole,
            without_gradient=self.observer.without_gradient(),
        )

    def _read_states(self, *, known: bool) -> dict[str, Any]:
        """Return the field of a snapshot with the script's state beside model and optimizer."""
        return {"extra": self.states.read(known=known)}

    def _index(self, offset: int) -> int:
        return self.steps * STRIDE + offset

    def _write_snapshot(self, action: str, index: int, **infos: Any) -> None:
        from pytest_distcompat.events import SnapshotTaken

        snapshot = Snapshot(self.rank.rank, "train", action, index, **infos)
        self.rank.log.write(SnapshotTaken(action, index, encode(snapshot)))


def _is_trainable(module: Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


#: How many seconds a rank waits for the others to write their parts of a checkpoint.
CHECKPOINT_TIMEOUT_S = 60.0


def anyone_wrote(hosted_rank: HostedRank, wrote: bool) -> bool:
    """Tell whether any rank wrote a file, when the logs of all ranks say whether they did."""
    from pytest_distcompat.ext.scripts.events import TrainsOn

    return any(event.saved for event in _from_all_ranks(hosted_rank, TrainsOn(wrote)))


def exit_together(hosted_rank: HostedRank) -> None:
    """End this process when the log files of all ranks say that they have called this."""
    from pytest_distcompat.ext.scripts.events import Stopped

    _from_all_ranks(hosted_rank, Stopped())
    hosted_rank.exit_like_preempted()


def _from_all_ranks(hosted_rank: HostedRank, event: _E) -> list[_E]:
    """Log the event, wait until all ranks have logged one like it, and return these.

    There is no collective in that.
    """
    from torch import distributed

    from pytest_distcompat.events import of_kind
    from pytest_distcompat.launch.rank_log import LogReader

    hosted_rank.log.write(event)
    world_size = 1
    if distributed.is_initialized():
        world_size = distributed.get_world_size()
    logs = LogReader(hosted_rank.directory, range(world_size))
    logged: list[_E] = []

    def all_logged() -> bool:
        of_each_rank = []
        for events in logs.read().values():
            of_each_rank.append(of_kind(type(event), events))
        logged[:] = itertools.chain.from_iterable(of_each_rank)
        return all(of_each_rank)

    clock.wait_until(all_logged, CHECKPOINT_TIMEOUT_S, every=0.05)
    return logged
