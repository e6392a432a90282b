"""Recorder: makes snapshots of the training in one rank of an unmodified script.

There is one ``Recorder`` in each rank, a process that trains (``wrappers.current_recorder``). The
rest of the probe calls it: ``instrumentation`` wraps functions of torch, accelerate, DeepSpeed and
others, and each wrapper calls methods such as ``before_backward`` and ``after_step`` when the
script calls that function. The recorder writes lines of the rank's log, ``rank-0.jsonl``, which the
parent process reads after the run (``result``).

A wrapper runs the function inside of ``with recorder.inside_call()``. Only the outermost wrapped
call is the script's own; a call inside another one is the library's. Most calls, such as a save, do
not train: what happens inside them is not recorded as training, not even an optimizer's step.

A *snapshot* is what was read of model, optimizer and scheduler after one *action*. In the project's
other runs a driver, a class that the user writes, has a method for each action. A script has none,
so the recorder infers when an action is over:

- ``build_model``: the *unwrapped* model, before DDP, FSDP or DeepSpeed wraps it;
- ``build``: just before the first step;
- ``step``: when the next call begins, because only then the scheduler has stepped too;
- ``save``, ``load``: after the call that writes or reads a checkpoint;
- ``export``: the trained model, at each call that may be the last to see it.

The index of a snapshot is 100 (``STRIDE``) times the steps taken so far plus an offset: the third
step has 300, a checkpoint after it 310. All ranks count the same steps, so they agree on the index
although one of them may save alone.

A snapshot that is *whole* has all tensors of the model and the optimizer, by their digests (hashes
of their values); others have numbers alone.

The recorder takes part in no collective and changes nothing in the script. But a test that resumes
a script (``resume_roundtrip``) has it end all ranks after the checkpoint of step ``stop_after``, as
if they had been preempted.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.decode import encode
from pytest_distcompat.ext.scripts import guard
from pytest_distcompat.ext.scripts.environment import ProbeConfig
from pytest_distcompat.ext.scripts.hosted_rank import HostedRank
from pytest_distcompat.ext.scripts.named_states import NamedStates
from pytest_distcompat.ext.scripts.stopping import anyone_wrote, exit_together
from pytest_distcompat.ext.scripts.tracked_objects import TrackedObjects
from pytest_distcompat.trace import Snapshot, Sums

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

#: The distance between the snapshot indices of two steps.
STRIDE = 100
#: The offsets of the snapshots between them. The first two are those of step 0.
BUILD_MODEL = 0
BUILD = 1
LOAD = 2
#: The first checkpoint after a step has the offset 10, the second one 12.
SAVE = 10
#: The trained model, action ``export``.
END = 90


class Recorder:
    """State of the probe in one rank of a script.

    Args:
        rank: This process as a rank; its ``log`` gets the snapshots.
        config: How many steps to record, and what else.
    """

    def __init__(self, rank: HostedRank, config: ProbeConfig) -> None:
        from pytest_distcompat.probe.observe import Observer

        self.rank = rank
        self.config = config
        #: Records what happens inside a step, by hooks of torch: gradients, dtypes, collectives.
        self.observer = Observer(guard.guarded)
        #: This rank's own device, such as ``cpu`` or ``cuda:1``.
        self.device = config.device
        if config.device != "cpu":
            local_rank = os.environ.get("LOCAL_RANK", "0")
            self.device = f"{config.device}:{local_rank}"
        #: The optimizer steps that are finished.
        self.steps = 0
        #: How many wrapped calls are going on, one inside the other: 2 while
        #: ``Accelerator.prepare`` calls ``fully_shard``.
        self.depth = 0
        #: How many of these do not train (``inside_call``).
        self._ignored_depth = 0
        #: The models, optimizers and schedulers that the script has made.
        self.tracked = TrackedObjects(config.blocks)
        #: The script's state beside model and optimizer: variables that the user names, such as
        #: ``ema``, and objects that a library saves or averages weights in.
        self.states = NamedStates(config.extra_state)
        #: The outermost module that computes in training, whose inputs are recorded.
        self._root: weakref.ref[Module] | None = None
        #: The model that is trained, as the trainer wrapped it.
        self._model: weakref.ref[Module] | None = None
        #: The same model since its last step, by a strong reference: when the ``main`` of a script
        #: returns, nothing else holds the model, and it must still be there at the end of the
        #: process. This costs little memory, because ``_optimizer`` keeps the parameters anyway.
        self._trained_model: Module | None = None
        #: True inside a step of a DeepSpeed engine, where the model is in an intermediate state.
        self.in_engine = False
        #: The optimizer that trains the model, as the trainer wrapped it; a list of several.
        self._optimizer: Any = None
        #: The handles of torch by which the probe's hooks are removed from modules.
        self._hooks: list[Any] = []
        #: What ``backward`` was called with since the last step: a loss for each micro-batch.
        self._losses: list[torch.Tensor] = []
        #: Fields of the snapshot of the last step, until ``finish_step`` writes it.
        self._pending: dict[str, Any] | None = None
        #: Whether a checkpoint was loaded before the first step.
        self._loaded = False
        #: Action -> fields of the snapshots after a load, written only if the loaded model is never
        #: trained.
        self._untrained_snapshots: dict[str, dict[str, Any]] = {}
        #: Whether the first step has begun (the trainer is built), and whether there was a process
        #: group then.
        self._built = False
        self._had_process_group = False
        #: How many checkpoints were written since the last step.
        self._saves = 0
        #: The number of steps after which the trained model was recorded last; -1 for never.
        self._final_recorded_at = -1
        #: Whether the run ends when the script begins the next step: the checkpoint of step
        #: ``stop_after`` is written.
        self._should_stop = False
        #: Whether this rank has written a file of its own since the last step, by ``torch.save``.
        self._wrote_file = False
        #: Whether the ranks have told each other (``anyone_wrote``) if they wrote a file of their
        #: own after step ``stop_after``.
        self._compared = False
        #: Whether the script has read a file of ``torch.save``.
        self._read_file = False
        self._update_observer()
        rank.before_end = self._before_end

    def _before_end(self) -> None:
        """Write the snapshots that are still missing; ``HostedRank`` calls this at the end."""
        from torch import distributed

        self.call_unobserved(self.finish_step)
        # Without its process group a rank of ZeRO-3 does not know its shards; it was recorded
        # before the group was destroyed.
        if not self._had_process_group or distributed.is_initialized():
            self.call_unobserved(self.record_final_model)
        if not self._built:
            # The script has loaded a model and never trained it, as an evaluation does.
            offset_by_action = {"build_model": BUILD_MODEL, "load": LOAD}
            for action, fields in self._untrained_snapshots.items():
                self._write_snapshot(action, offset_by_action[action], **fields)
        self._trained_model = None

    @property
    def in_full(self) -> bool:
        """Tell whether the current step is recorded in full: it is among the first, 5 by default.

        Of later steps only the loss, learning rates and the like are recorded, which costs little.
        """
        return self.steps < self.config.steps

    def call_unobserved(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function of the probe in the middle of the script.

        What the function computes is not observed. In a forked child of the rank, such as a worker
        of a DataLoader, it is not called.
        """
        if self.rank.is_this_process():
            with self.observer.aside():
                function(*args)

    @contextlib.contextmanager
    def inside_call(self, *, training: bool = False) -> Iterator[bool]:
        """Mark the time inside a wrapped call.

        Yield whether it is the outermost one, which is the script's own. A call inside another one
        is the library's, and the probe does not count it.

        Args:
            training: Whether the call belongs to the training, as ``backward`` and a step do. In
                any other call nothing is observed: ``torch.distributed.checkpoint.state_dict``, for
                one, steps an optimizer without gradients to create its state.
        """
        outermost = self.depth == 0
        self.depth += 1
        if not training:
            self._ignored_depth += 1
        self._update_observer()
        recording: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if training and outermost:
            recording = self.observer.recording_operators()
        try:
            with recording:
                yield outermost
        finally:
            self.depth -= 1
            if not training:
                self._ignored_depth -= 1
            self._update_observer()

    def _update_observer(self) -> None:
        """Switch the observer on, or off where nothing is to be recorded."""
        self.observer.active = self.in_full and not self._ignored_depth

    # Models.

    def after_wrap(self, value: Any) -> None:
        """Track a model or an optimizer that a call such as ``Accelerator.prepare`` has wrapped."""
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
                # While torch.compile traces the model, the probe must not get into the graph.
                if not torch.compiler.is_compiling():
                    guarded(*arguments)

            handle = value.register_forward_pre_hook(Hook(hook), prepend=True, with_kwargs=True)
            self._hooks.append(handle)
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
        """Record the inputs of the outermost model. torch calls this before each forward.

        A script may wrap several modules, one inside the other. The outermost one is the first
        that computes in training: its forward begins before those of the modules inside.
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
        """Finish the step before, and record the inputs of a forward of the outermost model."""
        self._end_step_or_stop()
        self.observer.record_inputs(module, args, kwargs)

    # Steps.

    def before_backward(self, loss: object) -> None:
        """Record the loss, before its gradients are computed.

        ``loss`` is whatever the script called ``backward`` on. What is no single number, such as
        a list of tensors, is no loss.
        """
        import torch

        self._end_step_or_stop()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())

    def before_step(self, optimizer: Any, engine: Any = None) -> None:
        """Record the built model before the first step; do nothing before later steps.

        Args:
            optimizer: The torch optimizer that is about to step; None if an engine steps.
            engine: The DeepSpeed engine that is about to step: its model and its optimizer.
        """
        # A step inside a call that does not train is none of the script's. An engine reports its
        # step, and then calls the optimizer, which reports it once more.
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
            # What the script loaded has reached the model by now.
            self._loaded = False
            self._write_snapshot("load", self._index(LOAD), **fields)

    def after_step(self) -> None:
        """Read the model after a step of the optimizer or engine.

        The fields are written by ``finish_step``, with the scheduler, which steps later.
        """
        if self._model is not None and not self.in_engine and not self._ignored_depth:
            self._pending = self._read_fields(whole=self.in_full)
            self._trained_model = self._model()

    def finish_step(self) -> None:
        """Write the snapshot of the last step, if it is not written yet.

        Each method that begins something new calls this first.
        """
        if self._pending is None:
            return
        from pytest_distcompat.probe.optimizer import read_scheduler

        fields = self._pending
        self._pending = None
        if self.in_full:
            # Extra state is read as late as this: a script updates an average of the weights
            # after the optimizer's step.
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
            # From the next step on the probe costs as little as possible.
            self._update_observer()
            if self._root is not None:
                self.remove_hooks()

    def _mean_loss(self) -> float | None:
        """Return the mean of the losses of this step's micro-batches; None without a loss."""
        if not self._losses:
            return None
        losses = [float(loss) for loss in self._losses]
        return sum(losses) / len(losses)

    # Checkpoints.

    def before_save(self, everyone: bool) -> None:
        """Log that a checkpoint is about to be written.

        Args:
            everyone: Whether all ranks write it together. Only such a save is an action of the run,
                with a snapshot after it.
        """
        self.finish_step()
        if everyone:
            from pytest_distcompat.events import Action

            index = self._index(SAVE + 2 * self._saves)
            self.rank.log.write(Action("save", index))

    def after_save(self, path: Any, everyone: bool, model: bool) -> None:
        """Record a checkpoint that all ranks have written, or a file of one rank.

        Args:
            path: The file or directory.
            everyone: Whether all ranks write it together, rather than one rank alone.
            model: Whether it should hold the model.
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
            # The script may do more after the save: it is stopped when it begins the next step.
            self._should_stop = self.steps == self.config.stop_after

    def _end_step_or_stop(self) -> None:
        """Write the snapshot of the last step, and end the run if it is to stop there.

        Called when the script begins a new step.
        """
        self.finish_step()
        if self.steps == self.config.stop_after and not self._compared:
            self._compared = True
            # Ranks that wrote nothing learn now that another one has.
            self._should_stop = self._should_stop or anyone_wrote(self.rank, self._wrote_file)
        if self._should_stop:
            exit_together(self.rank)

    def after_file_load(self) -> None:
        """Note that the script has read a file by ``torch.load``.

        Its parts are not in the model yet. They are recorded before the first step, or, in a
        script that never trains, at the end.
        """
        self.finish_step()
        self._read_file = True

    def after_load(self) -> None:
        """Record a loaded checkpoint.

        Before the first step the script may go on to load further parts, such as the optimizer. So
        it is recorded at that step, or at the end of a script that never trains.
        """
        self.finish_step()
        if self._built and self._model is not None:
            fields = self._read_fields(whole=True) | self._read_states(known=True)
            self._write_snapshot("load", self._index(LOAD), **fields)
        else:
            self._loaded = True
            self._read_untrained(self.tracked.last_optimizer())

    def _read_untrained(self, optimizer: Any) -> None:
        """Read a loaded model and its optimizer, for a script that may never train them.

        The fields are kept in ``_untrained_snapshots``; ``_before_end`` writes them unless a step
        follows. ``optimizer`` is the last one that the script made or wrapped, None without any.
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
        """Record the trained model when training may be over, at most once after each step.

        The wrappers call this before calls that often come last, such as ``end_training`` or
        ``save_pretrained``. Of several such snapshots the last one counts.
        """
        self.finish_step()
        if self._read_file and not self._built and self._final_recorded_at != self.steps:
            # By now the script has loaded the parts of the file into the model.
            self._read_untrained(
                self.tracked.last_optimizer() or self.tracked.last_torch_optimizer()
            )
        model = self._live_model()
        if model is not None and self._final_recorded_at != self.steps:
            self._final_recorded_at = self.steps
            from pytest_distcompat.probe.snapshot import read_sums

            # Of each parameter the number of elements, their sum, and the sum of their squares.
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
        if self._model is None:
            return None
        return self._model()

    def _read_fields(self, *, whole: bool) -> dict[str, Any]:
        """Return the fields of a ``trace.Snapshot`` that are read of the model and its optimizer.

        Empty without a model. ``whole`` adds the tensors: each one's name, dtype and digest, which
        is a hash of its values.
        """
        from pytest_distcompat.probe.snapshot import read_snapshot_fields

        model = self._live_model()
        if model is None:
            return {}
        # The number of ranks as the trainer knows it, which may be wrong: accelerate's or
        # DeepSpeed's.
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
        """Return the field of a snapshot with the script's state beside model and optimizer.

        ``known`` adds the objects that a library saves (``NamedStates.read``). To read these may be
        a collective, so it is True only where all ranks are.
        """
        return {"extra": self.states.read(known=known)}

    def _index(self, offset: int) -> int:
        """Return the index of a snapshot after the last step, such as 310 for ``SAVE``."""
        return self.steps * STRIDE + offset

    def _write_snapshot(self, action: str, index: int, **infos: Any) -> None:
        """Write a snapshot to the rank's log; ``infos`` are fields of ``trace.Snapshot``."""
        from pytest_distcompat.events import SnapshotTaken

        snapshot = Snapshot(self.rank.rank, "train", action, index, **infos)
        self.rank.log.write(SnapshotTaken(action, index, encode(snapshot)))


def _is_trainable(module: Module) -> bool:
    """Tell whether any parameter of a module is trained."""
    return any(parameter.requires_grad for parameter in module.parameters())
