"""What a rank of a suite does: the driver's methods in order, the probe after each. Started by name, imported by nobody."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat import clock
from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import STEP_ACTIONS, Driver, Plan
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.run_paths import RunPaths
from pytest_distcompat.scenario import Run
from pytest_distcompat.trace import Snapshot
from pytest_distcompat.world import World

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.launch import RankLog
    from pytest_distcompat.probe import Observer

#: The actions that are the trainer's own, and may be one call to it.
TRAINING = STEP_ACTIONS | {"build", "load", "save"}


def run(payload: Mapping[str, Any], log: RankLog) -> None:
    """One run on this rank.

    ``payload``: ``driver`` (a name or module:attribute), ``cell`` (an id), ``device`` (cpu or cuda), ``run`` (the fields
    of a Run), ``ranks`` (of the cell that the run is for) and the directories ``save_to``, ``load_from`` and ``export``.
    a run with damage has a copy of ``load_from`` in ``save_to``, and loads that.
    """
    from pytest_distcompat.probe import Observer

    told = payload["run"]
    run = Run(
        **{**told, "actions": tuple(told["actions"]), "only": None if told["only"] is None else tuple(told["only"])}
    )
    world = World.from_environment(payload["device"])
    if world.shared:
        _meet_by_gloo(world)
    driver = find_driver(payload["driver"])(Cell.parse(payload["cell"]), world)
    run_paths = RunPaths.told(payload)
    if log.by_hand:
        run_paths.clear(run, world.rank, log.path.parent)
    rank = _Rank(driver, run, run_paths, Observer(), log)
    rank.live()
    _leave(driver)


def _meet_by_gloo(world: World) -> None:
    """Ranks that share a GPU cannot use NCCL, which trainers choose by themselves if nobody else was first."""
    import torch
    from torch import distributed

    torch.cuda.set_device(world.device)
    distributed.init_process_group(world.backend)


#: What must not be destroyed before the process ends, see ``_leave``.
_kept: list[object] = []


class _Rank:
    """The actions of one run on one rank, each with what the probe sees after it."""

    def __init__(self, driver: Driver, run: Run, run_paths: RunPaths, observer: Observer, log: RankLog) -> None:
        self.driver, self.run, self.run_paths, self.observer, self.log = driver, run, run_paths, observer, log
        self.index, self.end = -1, 0
        self.number = run.first_step
        self.unwrapped: Module | None = None

    def live(self) -> None:
        """All actions, to the end."""
        self._begin()
        while self.index < len(self.run.actions):
            if self.run.actions[self.index] in TRAINING:
                self._train()
            else:
                self._own()

    def _begin(self) -> None:
        """Say which action is next: if it hangs or dies, that is the last that is heard of this rank."""
        self.index += 1
        if self.index < len(self.run.actions):
            self.log.write("action", action=self.run.actions[self.index], index=self.index)
        self.observer.restart()
        self.began = clock.now()

    def _end(self, infos: Mapping[str, Any], seconds: float) -> None:
        action = self.run.actions[self.index]
        snapshot = Snapshot(self.driver.world.rank, self.run.name, action, self.index, seconds=seconds, **infos)
        self.log.write("snapshot", action=action, index=self.index, snapshot=snapshot.to_json())
        self._begin()

    def _own(self) -> None:
        infos = getattr(self, f"_{self.run.actions[self.index]}")()
        self._end(infos, clock.now() - self.began)

    def _train(self) -> None:
        """All of the trainer's own methods up to the next that is not: one call. Files are read in between, by us."""
        rest = self.run.actions[self.index :]
        length = next((n for n, action in enumerate(rest) if action not in TRAINING | {"files"}), len(rest))
        actions = tuple(action for action in rest[:length] if action in TRAINING)
        self.end = self.index + length
        unwrapped, self.unwrapped = self.unwrapped, None
        found = self.run_paths.save_to if self.run.damage else self.run_paths.load_from
        plan = Plan(actions, self.number, self.run_paths.save_to, found)
        with self.observer.watching():
            self.observer.record_operators(on=self._closely)
            self.driver.train(unwrapped, plan, self._seen)  # type: ignore[arg-type]  # a plan without build needs no model
        if self.index < self.end:
            raise RuntimeError(f"the driver's train() came back before {self.run.actions[self.index]!r} was seen")

    @property
    def _closely(self) -> bool:
        """Whether single operators are to be seen in the next action."""
        following = self.run.actions[self.index] if self.index < self.end else ""
        if following not in STEP_ACTIONS or self.run.first_step:
            # A training that goes on is compared with one that never stopped: what it reduces shows in its values.
            return False
        steps = sum(action in STEP_ACTIONS for action in self.run.actions)
        # What the check of accumulation counts in every step of an epoch, all others ask of one.
        return self.number == min(CLOSE, steps) - 1 or self.driver.cell.option("grad_accum") != 1

    def _seen(self, action: str, loss: float | None = None) -> None:
        """What ``Driver.train`` calls after each action."""
        # Before we look: that is no time of the trainer's.
        seconds = clock.now() - self.began
        expected = self.run.actions[self.index] if self.index < self.end else ""
        if action != expected:
            told = f"the next action of the plan is {expected!r}" if expected else "the plan is done"
            raise RuntimeError(f"the driver's train() told of {action!r}; {told}")
        with self.observer.aside():
            infos = self._look(whole=action not in STEP_ACTIONS or self.number < self.run.first_step + WHOLE)
        if action in STEP_ACTIONS:
            driver = self.driver
            infos |= {"loss": _number(loss, "the loss"), "grad_norm": _number(driver.grad_norm, "grad_norm")}
            infos |= {"tokens": int(_number(driver.tokens, "tokens") or 0), **self.observer.infos()}
            self.number += 1
        elif action == "load":
            # A load that trains again reaches the same state: its steps alone tell.
            infos |= {"steps": tuple(self.observer.steps)}
        self._end(infos, seconds)
        while self.index < len(self.run.actions) and self.run.actions[self.index] == "files":
            # By now all ranks have left ``save``, for they took collective steps since.
            self._own()
        self.observer.record_operators(on=self._closely)

    def _build_model(self) -> dict[str, Any]:
        self.unwrapped = self.driver.build_model()
        return self._show(self.unwrapped)

    def _reload(self) -> dict[str, Any]:
        self.unwrapped = self.driver.reload(self.run_paths.export)
        return self._show(self.unwrapped)

    def _show(self, model: Module) -> dict[str, Any]:
        from pytest_distcompat.probe import read_unwrapped

        driver = self.driver
        infos = {"unwrapped": read_unwrapped(model, driver.blocks, driver.ignored_modules, driver.options)}
        if not self.driver.cell.option("compile"):
            # A hook would break the graph that compile is to see.
            self.observer.attach(model)
        return infos

    def _files(self) -> dict[str, Any]:
        """Rank 0 only; what was exported comes after what was saved."""
        from pytest_distcompat.probe import read_files, read_saved

        if self.driver.world.rank:
            return {}
        exported = read_files(self.run_paths.export, "export/")
        found = {"files": read_files(self.run_paths.save_to) + exported}
        if self.driver.cell.option("save_only_model"):
            found["saved"] = read_saved(self.run_paths.save_to)
        return {what: tuple(info.renamed(self.driver.saved_name) for info in infos) for what, infos in found.items()}

    def _export(self) -> dict[str, Any]:
        if not self.driver.can("export"):
            return {}
        # What was trained: an export that rounds the live model, and then writes it, is to be seen.
        infos = self._look(whole=True)
        self.run_paths.export.mkdir(parents=True, exist_ok=True)
        self.driver.export(self.run_paths.export)
        return infos

    def _evaluate(self) -> dict[str, Any]:
        from pytest_distcompat.probe import sample

        if not self.driver.can("evaluate"):
            return {}
        model = self.unwrapped if self.unwrapped is not None else self.driver.model
        with _uncompiled():
            return {"outputs": sample(self.driver.evaluate(model))}

    def _reference(self) -> dict[str, Any]:
        from pytest_distcompat.probe import read_optimizer

        driver, model = self.driver, self.unwrapped
        assert model is not None
        model.float()
        with self.observer.watching():
            loss = driver.reference(model, self.number, self.run_paths.ranks)
        whole = self.number < WHOLE
        self.number += 1
        infos = {"loss": _number(loss, "the loss"), "grad_norm": _number(driver.grad_norm, "grad_norm")}
        infos |= self.observer.infos()
        if driver.optimizer is None:
            raise RuntimeError("reference() is to set self.optimizer to the optimizer that it steps, as train() does")
        return infos | {"optimizer": read_optimizer(model, driver.optimizer, whole=whole)}

    def _rounded(self) -> dict[str, Any]:
        """Its author was not told of this: that a reference cannot be computed so is no failure, only nothing is known."""
        import torch

        dtype = getattr(torch, PRECISIONS.get(self.driver.cell.precision).compute)
        with contextlib.ExitStack() as stack, contextlib.suppress(Exception):
            for device in sorted({"cpu", torch.device(self.driver.world.device).type}):
                stack.enter_context(torch.autocast(device, dtype))
            return self._reference()
        return {}

    def _damage(self) -> dict[str, Any]:
        from pytest_distcompat.corrupt import corrupt

        if self.driver.world.rank:
            return {}
        return {"files": (corrupt(self.run_paths.save_to, self.run.damage),)}

    def _look(self, *, whole: bool) -> dict[str, Any]:
        from pytest_distcompat.probe.snapshot import read_snapshot_fields

        driver = self.driver
        return read_snapshot_fields(
            driver.model,
            driver.optimizer,
            device=driver.world.device,
            scheduler=driver.scheduler,
            scaler=driver.scaler,
            trainer_world_size=driver.trainer_world_size(),
            whole=whole,
        )


def _number(value: Any, what: str) -> float | None:
    """As the driver says it: trainers have it as a tensor too. Raises TypeError for what is no number."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        told = f"{what} is a {type(value).__name__}: {value!r:.200}"
        raise TypeError(f"{told}; expected a number, or a tensor with one element") from error


def _uncompiled() -> contextlib.AbstractContextManager[object]:
    """Inside, what torch.compile wraps runs as it is written: the question is what the weights are, and a graph for one
    batch takes as long as all of the training. https://docs.pytorch.org/docs/stable/generated/torch.compiler.set_stance.html
    """
    if "torch._dynamo" not in sys.modules:
        # To ask for it would import it, seconds of a rank that compiles nothing.
        return contextlib.nullcontext()
    import torch

    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


#: So many steps of a run are looked at in full: no check compares more of them value by value.
WHOLE = 5
#: In which step of a training, counted from 1, single operators are seen; in its last if it has fewer.
CLOSE = 3


def _leave(driver: Driver) -> None:
    """A rank that did all it was told leaves its process group properly; NCCL warns of one that does not.

    The driver outlives the group: DDP's reducer holds the last reference to a gloo group, whose destructor joins a
    worker thread while it holds the GIL that the thread may be waiting for. Seen once in 36 runs as a hang on return.
    """
    from torch import distributed

    _kept.append(driver)
    if distributed.is_initialized():
        with contextlib.suppress(RuntimeError):
            distributed.destroy_process_group()
