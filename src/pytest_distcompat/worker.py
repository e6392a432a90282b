"""Entry point of a suite's ranks: calls the driver's methods in order, and the probe after each.

A *run* is one process group from start to end, on which every rank performs the same list of
*actions*, such as ``build_model, build, step, step, save, files`` (``scenario.Run``). ``runner`` in
pytest's process requests it from a launcher. The launcher forks the ranks, and each calls ``run``
of this module with the payload of the request: the driver's name, the cell's id, the actions, and
where to save. A *driver* is the trainer under test, as a class with a few methods. A *cell* is one
point of the matrix, such as ``fsdp2-fp32-w2``.

There are two kinds of actions:

- ``build``, ``load``, ``step``, ``overflow``, ``save`` and calls (``call step()``) are the
  trainer's. A row of them is handed to ``Driver.train`` as one ``Plan``, because a trainer may do
  them all in one call. The driver reports each when it is done.
- all others are methods of ``Rank`` with that name: ``_build_model``, ``_files``, ``_reference``.

After each action the *probe* (package ``probe``) reads model, optimizer or files, and the rank logs
what it read as a ``Snapshot``, a line of JSON. ``runner`` reads the logs, and checks judge them.
The rank itself judges nothing. The *unwrapped* model is the one before the trainer wraps it. In a
run of the *reference* one process repeats the training without the trainer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_distcompat import clock
from pytest_distcompat.calls import CALL, REFERENCE_CALL, Call, kind_of
from pytest_distcompat.decode import decode, encode, prepare
from pytest_distcompat.driver import RESUME_AT, STEP_ACTIONS, Driver, Plan
from pytest_distcompat.drivers import DRIVERS, Calls, find_driver
from pytest_distcompat.events import Action, SnapshotTaken
from pytest_distcompat.launch.files import log_file
from pytest_distcompat.models import MODELS
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.recording import RecordedRank, Recorder, recording
from pytest_distcompat.registry import installed_entry_points
from pytest_distcompat.run_paths import RunPaths, SuitePayload
from pytest_distcompat.scenario import ROWS, Run
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import FileInfo, LoadedBatch, Loader, RowsInfo, Snapshot
from pytest_distcompat.world import World

if TYPE_CHECKING:
    from pathlib import Path

    from torch.nn import Module

    from pytest_distcompat.launch.rank_log import RankLog
    from pytest_distcompat.probe.observe import Observer

# Fork servers import this module: their ranks need not look for the registered items again, nor
# inspect the dataclass of the payload.
installed_entry_points()
prepare(SuitePayload)
for _registry in (STRATEGIES, PRECISIONS, MODELS, DRIVERS):
    # One that cannot be imported is left to the rank that needs it, which reports that.
    with contextlib.suppress(Exception):
        _registry.names()

#: An epoch, and a batch of it.
EpochAndBatch = tuple[int, int]

#: The actions that are methods of the trainer: it may do several of them in one call.
TRAINING = STEP_ACTIONS | {"build", "load", "save", "again"}


def is_training(action: str) -> bool:
    """Tell whether an action is one of the trainer, which may do several of them in one call."""
    return action in TRAINING or action.startswith(CALL)


def run(payload: Mapping[str, Any], log: RankLog) -> None:
    """Perform one run on this rank.

    The launcher calls it (``Request.target``) on each rank, in the rank's process.

    Args:
        payload: A ``SuitePayload`` as plain data.
        log: The log of this rank, which pytest's process reads.
    """
    from pytest_distcompat.probe.observe import Observer

    suite_payload = decode(SuitePayload, payload)
    _capture_log(suite_payload.log_level, log)
    cell = suite_payload.driver_cell
    world = World.from_environment(suite_payload.device)
    world = dataclasses.replace(world, own_disks=cell.own_disks)
    world.divide_memory()
    if world.shared and world.backend == "gloo":
        # Before the trainer would choose NCCL by itself.
        _init_gloo(world)
    # An extension may record something on each rank, such as the executed lines, for the cell whose
    # check needs this run.
    recorded_rank = RecordedRank(
        driver=suite_payload.driver,
        cell=suite_payload.asking_cell,
        directory=log.path.parent,
        rank=log.rank,
    )
    with recording(suite_payload.recorders, recorded_rank) as recorders:
        driver = find_driver(suite_payload.driver)(cell, world)
        if log.by_hand:
            # A user repeats the run with the command that its failure shows: what the first try
            # saved is in the way.
            of_run = dataclasses.replace(world, own_disks=suite_payload.own_disks)
            suite_payload.paths.clear(suite_payload.run, log.path.parent, first=of_run.writes_first)
        rank = Rank(driver, suite_payload.run, suite_payload.paths, Observer(), log)
        rank.recorders = recorders
        rank.perform()
        _end_process_group(driver)


def _capture_log(level: str, log: RankLog) -> None:
    """Write log records that no handler takes to a file, in the format of pytest.

    The root logger gets no handler of its own.

    Args:
        level: The log level of pytest, ``INFO`` or ``20``; empty if none is set.
        log: The log of this rank; the file is beside it.
    """
    # With one ``logging.basicConfig`` of the trainer would do nothing
    # (https://docs.python.org/3/library/logging.html#logging.lastResort).
    level_of_file = logging.WARNING
    if level:
        number = int(level) if level.isdecimal() else logging.getLevelName(level.upper())
        root = logging.getLogger()
        root.setLevel(min(root.level, number))
        level_of_file = root.level
    if not log.by_hand:
        path = log_file(log.path.parent, log.rank)
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace", delay=True)
        line = "%(levelname)-8s %(name)s:%(filename)s:%(lineno)d %(message)s"
        handler.setFormatter(logging.Formatter(line))
        handler.setLevel(level_of_file)
        logging.lastResort = handler


def _init_gloo(world: World) -> None:
    """Initialise the process group with gloo, for ranks that share a GPU.

    They cannot use this NCCL, the default of trainers.
    """
    import torch
    from torch import distributed

    torch.cuda.set_device(world.device)
    distributed.init_process_group(world.backend)


#: Drivers that must not be destroyed before the process ends, see ``_end_process_group``.
_alive: list[object] = []


class Rank:
    """Actions of one run on one rank, each followed by a snapshot.

    ``perform`` goes through the run's actions. A method that is named like an action,
    ``_build_model``, performs it and returns fields of the ``Snapshot`` by name: ``{"loss": 2.5}``.
    ``_begin`` and ``_end`` stand around each action.
    """

    #: What extensions record on this rank.
    recorders: Sequence[Recorder] = ()

    def __init__(
        self, driver: Driver, run: Run, run_paths: RunPaths, observer: Observer, log: RankLog
    ) -> None:
        self.driver = driver
        self.run = run
        self.run_paths = run_paths
        self.observer = observer
        self.log = log
        #: The index of the next action in ``run.actions``; -1 before the first.
        self.index = -1
        #: The index after the last action of the trainer's plan.
        self.end = 0
        #: How many steps this training has taken, those before the checkpoint that it loads
        #: included.
        self.number = run.first_step
        #: How many it has taken after each action of its plan that is not done.
        self.later_numbers: Iterator[int] = iter(())
        #: The model that nothing wraps, from ``build_model`` until the trainer gets it.
        self.unwrapped: Module | None = None
        #: The names of its networks, which a checkpoint may have one by one.
        self.networks: tuple[str, ...] = ()
        # The observer records the steps of the trainer, by hooks: gradients, collectives, inputs.
        observer.trainer = self._trainer

    def _trainer(self) -> tuple[Module | None, Any, bool]:
        """Return the trained model, its optimizer, and whether the step is one of the first.

        The observer calls it in its hooks; the first steps are recorded with all values.
        """
        # In a reference run there is no trainer, and the unwrapped model is trained.
        model = self.unwrapped
        if model is None:
            model = self.driver.model
        return model, self.driver.optimizer, self._among_first_steps

    @property
    def _among_first_steps(self) -> bool:
        """Tell whether the next step is one of the first of this run.

        These are recorded with all values.
        """
        return self.number < self.run.first_step + WHOLE_STEPS

    @property
    def _next(self) -> str:
        """The next action of the run; empty if all are done."""
        if self.index < len(self.run.actions):
            return self.run.actions[self.index]
        return ""

    @property
    def _next_in_plan(self) -> str:
        """The action that the trainer is to do next; empty if its plan is done.

        A plan may have ``files`` in it, which this rank does itself (``_record_action``).
        """
        if self.index < self.end:
            return self.run.actions[self.index]
        return ""

    # Going through the actions.

    def perform(self) -> None:
        """Perform all actions of the run."""
        self._begin()
        while self.index < len(self.run.actions):
            if is_training(self.run.actions[self.index]):
                self._train()
            else:
                self._perform_own()

    def _begin(self) -> None:
        """Log the next action: if it hangs or dies, that is the last event of this rank."""
        self.index += 1
        action = self._next
        if action:
            self.log.write(Action(action, self.index))
        for recorder in self.recorders:
            recorder.switch(action)
        self.observer.restart()
        self.began = clock.now()

    def _end(self, infos: Mapping[str, Any], seconds: float) -> None:
        """Log the snapshot of the action that is done, and begin the next one.

        Args:
            infos: Fields of the ``Snapshot`` by name.
            seconds: How long the action took.
        """
        action = self.run.actions[self.index]
        snapshot = Snapshot(
            rank=self.driver.world.rank,
            run=self.run.name,
            action=action,
            index=self.index,
            seconds=seconds,
            **infos,
        )
        event = SnapshotTaken(action, self.index, encode(snapshot))
        self.log.write(event)
        self._begin()

    def _perform_own(self) -> None:
        """Perform an action of the worker's own, by the method of its name."""
        action = self.run.actions[self.index]
        if action.startswith(REFERENCE_CALL):
            infos = self._reference_call()
        else:
            infos = getattr(self, f"_{action}")()
        self._end(infos, clock.now() - self.began)

    # The trainer's actions: handed over as one plan, reported one by one.

    def _train(self) -> None:
        """Hand the trainer its actions as one plan; read files in between.

        The plan goes up to the next action of the worker's own. Only ``files`` may stand inside it:
        then files are read while the trainer waits for its report to return.
        """
        actions = []
        self.end = self.index
        for action in self.run.actions[self.index :]:
            if is_training(action):
                actions.append(action)
            elif action != "files":
                break
            self.end += 1
        # From here on the trainer's own model is observed and evaluated (``driver.model``).
        unwrapped = self.unwrapped
        self.unwrapped = None
        # A run that damages a checkpoint damages a copy, which stands where it saves.
        load_from = self.run_paths.save_to if self.run.damage else self.run_paths.load_from
        plan = Plan(
            actions=tuple(actions),
            first_step=self.number,
            save_to=self.run_paths.save_to,
            load_from=load_from,
            loads_first=self.run.loads_first,
        )
        self.later_numbers = iter(plan.next_steps())
        # What performs the calls of a walk (``call step()``), on this rank's batches.
        if self.driver.live_calls is not None:
            rank = self.driver.world.rank
            self.driver.caller = self.driver.live_calls(
                self.driver, self.run_paths.save_to / "called", (rank,), self.number
            )
        # ``_record_action`` is called inside ``train``, once after each action. The observer
        # records what the trainer does inside this block.
        with self.observer.watching():
            self.observer.record_operators(on=self._observes_operators)
            self.driver.train(unwrapped, plan, self._record_action)  # type: ignore[arg-type]  # a plan without build needs no model
        if self.index < self.end:
            raise RuntimeError(
                f"the driver's train() came back before {self.run.actions[self.index]!r} was seen"
            )

    @property
    def _observes_operators(self) -> bool:
        """Tell whether single operators are recorded in the next action.

        That is slow, so it is done in one step of a training only.
        """
        if self._next_in_plan not in STEP_ACTIONS or self.run.first_step:
            # A resumed training is compared by its values with one that never stopped.
            return False
        steps = sum(action in STEP_ACTIONS for action in self.run.actions)
        # The accumulation check counts collectives in every step; all others read one step.
        return (
            self.number == min(OBSERVED_STEP, steps) - 1
            or self.driver.cell.option("grad_accum") != 1
        )

    def _record_action(self, action: str, loss: Any = None) -> None:
        """Record an action that ``Driver.train`` reports as done: its argument ``report``.

        Args:
            action: The action: ``step``.
            loss: The loss of a step, or what a call of the live trainer returned.

        Raises:
            RuntimeError: If it is not the next action of the plan.
        """
        # Before the probe reads anything, which is not the trainer's time.
        seconds = clock.now() - self.began
        if action != self._next_in_plan:
            state = "the plan is done"
            if self._next_in_plan:
                state = f"the next action of the plan is {self._next_in_plan!r}"
            raise RuntimeError(f"the driver's train() reported {action!r}; {state}")
        if action == "build":
            self._observe_built()
        # ``aside``: what the probe computes is not recorded as the trainer's.
        with self.observer.aside():
            infos = self._snapshot(whole=self._needs_all_values(action))
            if self.run.records_calls:
                infos |= self._called(loss)
        if action in STEP_ACTIONS:
            infos |= self._step(loss)
        elif action == "load":
            # A load that trains again reaches the same state: only its steps show it.
            infos["steps"] = tuple(self.observer.steps)
        self.number = next(self.later_numbers)
        self._end(infos, seconds)
        while self._next == "files":
            # All ranks have left ``save``: they took collective steps since.
            self._perform_own()
        self.observer.record_operators(on=self._observes_operators)

    def _observe_built(self) -> None:
        """Attach the observer to the model that the trainer has built, before its first step.

        Not to one that is compiled: hooks would break its graph.
        """
        if self.driver.model is not None and not self.driver.cell.option("compile"):
            self.observer.attach_to_built(self.driver.model)
        self._fit_first_scale()

    def _needs_all_values(self, action: str) -> bool:
        """Tell whether the snapshot after an action has digests of all tensors.

        It has, but for steps between the first and the last: no check compares those, and hashing
        takes time.
        """
        if self.run.records_calls or action not in STEP_ACTIONS or self._among_first_steps:
            return True
        later_actions = self.run.actions[self.index + 1 :]
        # The last step of the run has no step after it.
        return STEP_ACTIONS.isdisjoint(later_actions)

    def _step(self, loss: Any) -> dict[str, Any]:
        """Return the fields of a snapshot that only a step has: loss, norm, what was observed."""
        driver = self.driver
        infos = {
            "loss": _number(loss, "the loss"),
            "grad_norm": _number(driver.grad_norm, "grad_norm"),
            "tokens": int(_number(driver.tokens, "tokens") or 0),
            **self.observer.infos(),
        }
        if driver.pp_group is not None:
            # The model of a later pipeline stage is fed activations, so the batches are recorded in
            # place of the model's inputs.
            from pytest_distcompat.probe.inputs import digest_of_inputs

            with self.observer.aside():
                infos["inputs"] = tuple(digest_of_inputs([batch]) for batch in driver.fed)
        return infos

    def _fit_first_scale(self) -> None:
        """Begin at a loss scale (of fp16) that fits, unless a load brings one.

        If a load follows, the trainer keeps its own first scale: the loaded one is another, so that
        a load that forgets it shows. A checkpoint of another strategy need not bring the scale.
        """
        from pytest_distcompat.probe.snapshot import fit_first_scale

        remaining = self.run.actions[self.index + 1 :]
        loads = bool(remaining) and remaining[0] == "load"
        if not loads or self.run.strategy:
            fit_first_scale(self.driver.scaler, self.driver.optimizer)

    def _called(self, result: Any) -> dict[str, Any]:
        """Return the fields by which calls are compared, after an action.

        A run with calls makes calls such as ``step(clip='no')`` on the live trainer, and its
        reference makes the same calls in one process. ``result`` is what the action returned: a
        loss, outputs, whole tensors by name, or None.
        """
        from torch import Tensor

        from pytest_distcompat.probe.snapshot import read_call, sample

        action = self.run.actions[self.index]
        observes = False
        if action.startswith(CALL):
            call = Call.parse(action.removeprefix(CALL))
            observes = kind_of(type(self.driver.caller), call.name) == "observer"
        infos: dict[str, Any] = {
            "call": read_call(self.driver.model, result, observes=observes),
            "grad_norm": _number(self.driver.grad_norm, "grad_norm"),
        }
        if isinstance(result, Tensor):
            infos["outputs"] = sample(result)
        elif isinstance(result, float):
            infos["loss"] = result
        return infos | self.observer.infos()

    def _reference_call(self) -> dict[str, Any]:
        """Do a call of the live trainer in one process, on the batches of all ranks.

        The action reads ``reference step(clip='no')``.
        """
        driver = self.driver
        if driver.caller is None:
            # The first call: a plain trainer in place of the driver's own, on the batches of all
            # ranks (``run_paths.ranks`` of them) that the compared run has.
            assert self.unwrapped is not None
            driver.model = self.unwrapped.float()
            driver.optimizer = driver.make_optimizer(driver.model)
            driver.scheduler = driver.make_scheduler(driver.optimizer)
            driver.caller = Calls(driver, self.run_paths.save_to, range(self.run_paths.ranks))
        with self.observer.watching():
            call = self.run.actions[self.index].removeprefix(REFERENCE_CALL)
            result = driver.caller.perform(call)
            if result is None:
                result = driver.caller.outputs()
        return self._snapshot(whole=True) | self._called(result)

    # Actions of the worker's own, each a method with the name of the action.

    def _build_model(self) -> dict[str, Any]:
        """Make the model, and read it before anything wraps it."""
        self.unwrapped = self._placed(self.driver.build_model())
        infos = self._attach(self.unwrapped)
        # The keys that the model's library writes to files, if it renames tensors. An adapter is
        # written by PEFT. Checks read what rank 0 says, and to find the names takes a save of the
        # model.
        if not self.driver.world.rank and not self.driver.cell.option("lora"):
            written_names = tuple(self.driver.written_names(self.unwrapped))
            if written_names:
                infos["unwrapped"] = dataclasses.replace(
                    infos["unwrapped"], written_names=written_names
                )
        return infos

    def _reload(self) -> dict[str, Any]:
        """Load what an earlier run exported, as users do, and read that model."""
        from pytest_distcompat.probe.files import readable

        # Close the files only after the model is read: it may load its weights lazily.
        with readable(self.run_paths.export) as directory:
            self.unwrapped = self._placed(self.driver.reload(directory))
            return self._attach(self.unwrapped)

    def _placed(self, model: Module) -> Module:
        """Return the model, moved to this rank's device unless a trainer is built around it.

        Without a trainer the model itself is run, on batches that are on the device. A trainer
        moves the model itself.
        """
        if "build" not in self.run.actions:
            move_to_device(model, self.driver.world.device)
        return model

    def _attach(self, model: Module) -> dict[str, Any]:
        """Read a model that no trainer has yet, and observe it from then on."""
        from pytest_distcompat.probe.live import read_unwrapped
        from pytest_distcompat.probe.snapshot import read_products

        driver = self.driver
        self.networks = tuple(name for name, _ in model.named_children())
        compute = PRECISIONS.get(driver.cell.precision).compute
        unwrapped = read_unwrapped(
            model, driver.blocks, driver.ignored_modules, driver.options, compute
        )
        infos: dict[str, Any] = {
            # ``mean`` is what has an equal weight in the gradients of a step, such as ``token``.
            "unwrapped": dataclasses.replace(unwrapped, mean=driver.mean),
            # Before the trainer is built: what it changes shows against it.
            "products": read_products(driver.world.device),
        }
        infos |= self._settings()
        if not self.driver.cell.option("compile"):
            # A hook would break the graph that is to be compiled.
            self.observer.attach(model)
            if driver.cell.option("activation_checkpointing") and driver.cell.pp == 1:
                self.observer.attach_to_blocks(model, infos["unwrapped"].blocks)
        return infos

    def _files(self) -> dict[str, Any]:
        """Read the saved files, then the exported ones.

        Rank 0 reads them, or the first rank of each machine that has files of its own.
        """
        from pytest_distcompat.probe.files import read_files, read_saved

        rank = self.driver.world.rank
        if not self.driver.world.writes_first:
            return {}
        exported = read_files(self.run_paths.export, "export/", self.networks)
        # On several machines with disks of their own each first rank has files of the same names.
        prefix = f"of rank {rank}: " if rank else ""
        saved = read_files(self.run_paths.save_to, prefix, self.networks)
        infos = {"files": self._with_own_names(saved + exported)}
        if self.driver.cell.option("save_only_model"):
            infos["saved"] = self._with_own_names(read_saved(self.run_paths.save_to))
        return infos

    def _with_own_names(self, files: Iterable[FileInfo]) -> tuple[FileInfo, ...]:
        """Return files with the unwrapped model's names, which the driver says, for their keys."""
        return tuple(file.renamed(self.driver.saved_name) for file in files)

    def _export(self) -> dict[str, Any]:
        """Have the driver export the weights; nothing for a driver that cannot."""
        if not self.driver.can("export"):
            return {}
        # Read the model before the export, which may round the live model.
        infos = self._snapshot(whole=True)
        self.run_paths.export.mkdir(parents=True, exist_ok=True)
        self.driver.export(self.run_paths.export)
        return infos

    def _exported(self) -> dict[str, Any]:
        """Read the live model again: an export must not change it."""
        if not self.driver.can("export"):
            return {}
        return self._snapshot(whole=True)

    def _evaluate(self) -> dict[str, Any]:
        """Compute outputs of the trained or the reloaded model on one fixed batch."""
        from pytest_distcompat.probe.snapshot import sample

        if not self.driver.can("evaluate"):
            return {}
        model = self.unwrapped if self.unwrapped is not None else self.driver.model
        with _uncompiled():
            outputs = self.driver.evaluate(model)
        # ``sample`` returns a few of the numbers.
        return {"outputs": sample(outputs)}

    def _reference(self) -> dict[str, Any]:
        """Take a step of the same training in one process, in float32 and without wrappers.

        Checks compare the losses of the run on several ranks with its losses.
        """
        from pytest_distcompat.probe.optimizer import read_optimizer

        driver = self.driver
        model = self.unwrapped
        assert model is not None
        model.float()
        with self.observer.watching():
            loss = driver.reference(model, self.number, self.run_paths.ranks)
        whole = self.number < WHOLE_STEPS
        self.number += 1
        infos: dict[str, Any] = {
            "loss": _number(loss, "the loss"),
            "grad_norm": _number(driver.grad_norm, "grad_norm"),
            "averages": dict(driver.averages),
            **self.observer.infos(),
        }
        if driver.optimizer is None:
            raise RuntimeError(
                "reference() is to set self.optimizer to the optimizer that it steps, "
                "as train() does"
            )
        if whole:
            infos |= self._extra_of_reference()
        return infos | {"optimizer": read_optimizer(model, driver.optimizer, whole=whole)}

    def _extra_of_reference(self) -> dict[str, Any]:
        """Return the extra state that the driver has in the reference, too."""
        named = self.driver.extra_state_in(self.driver.cell)
        states = {name: expected for name, expected in named.items() if expected.in_reference}
        if not states:
            return {}
        from pytest_distcompat.probe.extra import read_extra_state

        return {"extra": read_extra_state(self.driver, states)}

    def _reference_again(self) -> dict[str, Any]:
        """Begin a second training of the reference, with the first batch."""
        self.driver.reference_again()
        self.number = 0
        return {}

    def _rounded(self) -> dict[str, Any]:
        """Take a step of the reference under autocast, which shows how far rounding alone moves it.

        Return nothing where it cannot run so, which is no failure: a model may have an operator
        that autocast does not know.
        """
        import torch

        dtype = getattr(torch, PRECISIONS.get(self.driver.cell.precision).compute)
        with contextlib.ExitStack() as stack, contextlib.suppress(Exception):
            for device in sorted({"cpu", torch.device(self.driver.world.device).type}):
                stack.enter_context(torch.autocast(device, dtype))
            return self._reference()
        return {}

    def _damage(self) -> dict[str, Any]:
        """Corrupt the checkpoint, on rank 0; its files entry says which file, and how."""
        from pytest_distcompat.corrupt import corrupt

        if self.driver.world.rank:
            return {}
        corrupted = corrupt(self.run_paths.save_to, self.run.damage, self.driver.loads_file)
        return {"files": (corrupted,)}

    # Rows of data loaders, metrics, and functions by which ranks exchange values.

    @property
    def _loaders(self) -> Mapping[str, Loader]:
        """The trainer's loaders in this cell, by name."""
        return self.driver.loaders_in(self.driver.cell)

    def _rows(self) -> dict[str, Any]:
        """Read two epochs of each loader, from their beginning."""
        return self._loaded(self._loaders, [(0, 0)], self.run_paths.save_to)

    def _resumed_rows(self) -> dict[str, Any]:
        """Read the loaders that can resume, from where an earlier run left them."""
        rows: list[RowsInfo] = []
        for name, loader in self._loaders.items():
            if not loader.resumes:
                continue
            for epoch, batch in RESUME_AT:
                if loader.midway or batch == 0:
                    info = self._rows_of_loader(name, epoch, batch, self.run_paths.load_from)
                    rows.append(info)
        return {"rows": tuple(rows)}

    def _moved_rows(self) -> dict[str, Any]:
        """Read the loaders that can resume with another number of ranks: with twice as many."""
        moved: list[str] = []
        for name, loader in self._loaders.items():
            if loader.moves:
                moved.append(name)
        # Twice as many ranks have read as many rows after half as many batches.
        starts: list[EpochAndBatch] = []
        for epoch, batch in RESUME_AT:
            if batch:
                starts.append((epoch, batch // 2))
        return self._loaded(moved, starts, self.run_paths.load_from)

    def _loaded(
        self, names: Iterable[str], starts: Sequence[EpochAndBatch], directory: Path
    ) -> dict[str, Any]:
        """Return the rows that loaders give from each of these epochs and batches on.

        Args:
            names: The names of the loaders.
            starts: The epochs and batches, ``[(1, 0), (1, 2)]``.
            directory: Where a loader saves its place, or what it resumes from.
        """
        rows = []
        for name in names:
            for epoch, batch in starts:
                rows.append(self._rows_of_loader(name, epoch, batch, directory))
        return {"rows": tuple(rows)}

    def _rows_of_loader(self, name: str, epoch: int, batch: int, directory: Path) -> RowsInfo:
        """Return the numbers of the rows that a loader gives, by epoch and batch.

        The loader begins at that epoch and batch.
        """
        loader = self._loaders[name]
        count = loader.rows or ROWS
        batches_by_epoch: dict[int, list[tuple[int, ...]]] = {}
        lengths: dict[int, int | None] = {}
        # An exception ends the run, and its message names the loader. The loaders after it are not
        # read. This rank does not know whether the others raised too, and at the same batch. One
        # that waits in a collective of this loader would take that of the next one for its own.
        self.log.doing = f"in rows() of the loader {name!r}"
        for given in self.driver.rows(name, count, (epoch, batch), directory):
            given_batch = LoadedBatch(*given)
            batches = batches_by_epoch.setdefault(given_batch.epoch, [])
            batches.append(tuple(map(int, given_batch.rows)))
            lengths[given_batch.epoch] = given_batch.length
        self.log.doing = ""
        epochs = tuple(tuple(batches) for batches in batches_by_epoch.values())
        # The loader, where it began, what is expected of it, and what it gave.
        return RowsInfo(name, epoch, batch, loader, epochs, tuple(lengths.values()))

    def _metrics(self) -> dict[str, Any]:
        """Run the trainer's evaluation; nothing for a driver that has none."""
        if not self.driver.can("metrics") or not self.driver.evaluates_in(self.driver.cell):
            return {}
        metrics: dict[str, float] = {}
        for name, value in self.driver.metrics(ROWS).items():
            metrics[name] = float(value)
        return {"metrics": metrics}

    def _exchanges(self) -> dict[str, Any]:
        """Call the functions by which ranks exchange values."""
        from pytest_distcompat.exchanges.calls import call_all

        return {"exchanges": tuple(call_all(self.driver.exchanges(), self.driver.world))}

    def _settings(self) -> dict[str, Any]:
        """Return torch's settings as a field of a snapshot; none if the trainer may set them."""
        from pytest_distcompat.probe.snapshot import read_settings

        if not self.driver.keeps_settings:
            return {}
        return {"settings": read_settings()}

    def _snapshot(self, *, whole: bool) -> dict[str, Any]:
        """Return what the probe reads of the live trainer; with ``whole`` the tensors too."""
        from pytest_distcompat.probe.snapshot import read_snapshot_fields

        driver = self.driver
        extra = self._settings()
        # The reference of calls has a model, and no trainer.
        has_trainer = type(driver.caller) is not Calls
        states = driver.extra_state_in(driver.cell)
        if whole and has_trainer and states:
            from pytest_distcompat.probe.extra import read_extra_state

            extra["extra"] = read_extra_state(driver, states)
        trainer_world_size = None
        if has_trainer:
            trainer_world_size = driver.trainer_world_size()
        return extra | read_snapshot_fields(
            driver.model,
            driver.optimizer,
            device=driver.world.device,
            scheduler=driver.scheduler,
            scaler=driver.scaler,
            trainer_world_size=trainer_world_size,
            whole=whole,
            without_gradient=self.observer.without_gradient(),
            pp_group=driver.pp_group,
        )


def move_to_device(model: Any, device: str) -> None:
    """Move a model to the device in place.

    A tensor on ``meta`` has nothing to move, and stays for what fills it later. Anything but a
    module is left to the check of what the driver returned.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        return
    target = torch.device(device)
    to_stay = {target, torch.device("meta")}
    tensors = [*model.parameters(), *model.buffers()]
    elsewhere = []
    for tensor in tensors:
        if tensor.device not in to_stay:
            elsewhere.append(tensor)
    if not elsewhere:
        # Models that place their tensors themselves may refuse a call of ``to``.
        return
    if not any(tensor.is_meta for tensor in tensors):
        model.to(target)
        return
    # ``Module.to`` refuses a model with a tensor on meta. Tied weights are one tensor, so that they
    # stay tied.
    for tensor in elsewhere:
        tensor.data = tensor.data.to(target)


def _number(value: Any, name: str) -> float | None:
    """Return a number, or a tensor with one element, as a float.

    Raises TypeError for anything else.
    """
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        actual = f"{name} is a {kind}: {value!r:.200}"
        raise TypeError(f"{actual}; expected a number, or a tensor with one element") from error


def _uncompiled() -> contextlib.AbstractContextManager[object]:
    """Run compiled modules eagerly.

    To compile a graph for one batch takes as long as the whole training.
    """
    # https://docs.pytorch.org/docs/stable/generated/torch.compiler.set_stance.html
    if "torch._dynamo" not in sys.modules:
        # ``torch.compiler`` would import it, which takes seconds on a rank that compiles nothing.
        return contextlib.nullcontext()
    import torch

    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


#: How many steps of a run are recorded with all values, and the last one: no check compares more of
#: them value by value.
WHOLE_STEPS = 5
#: The step of a training, counted from 1, in which single operators are recorded; the last one if
#: it has fewer.
OBSERVED_STEP = 3


def _end_process_group(driver: Driver) -> None:
    """Destroy the process group of a rank that is done; otherwise NCCL warns."""
    # The driver outlives the group: DDP's reducer holds the last reference to a gloo group, whose
    # destructor may join a thread that waits for the GIL.
    from torch import distributed

    _alive.append(driver)
    if distributed.is_initialized():
        with contextlib.suppress(RuntimeError):
            distributed.destroy_process_group()
