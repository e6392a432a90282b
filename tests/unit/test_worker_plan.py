"""Plans that a rank hands to the trainer, and errors for a trainer that departs from them; no process group, no probe."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch

from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import Driver, Plan
from pytest_distcompat.events import Error, Event, SnapshotTaken, of_kind
from pytest_distcompat.launch.rank import report_error
from pytest_distcompat.launch.rank_log import RankLog, read_events
from pytest_distcompat.probe import snapshot
from pytest_distcompat.run_paths import RunPaths
from pytest_distcompat.scenario import RESUME_RUN, RESUMED_ROWS_RUN, ROWS, TRAIN_RUN, Run
from pytest_distcompat.trace import Loader
from pytest_distcompat.worker import Rank
from pytest_distcompat.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_distcompat.driver import OnAction

SHORT = Run("short", ("build_model", "build", "step", "save", "files", "step", "export"), first_step=3)


class FakeProbe:
    """Fake rank log and probe: records actions as they end."""

    def __init__(self) -> None:
        self.snapshots: list[dict[str, Any]] = []
        self.watched = 0
        self.closely = False
        self.steps: list[Any] = []

    def write(self, event: Event) -> None:
        if isinstance(event, SnapshotTaken):
            self.snapshots.append(dict(event.snapshot))

    @property
    def actions(self) -> list[str]:
        return [snapshot["action"] for snapshot in self.snapshots]

    def after(self, action: str) -> list[dict[str, Any]]:
        """Return the snapshots after that action."""
        return [snapshot for snapshot in self.snapshots if snapshot["action"] == action]

    def restart(self) -> None:
        pass

    def attach(self, model: Any) -> None:
        pass

    def infos(self) -> dict[str, Any]:
        return {"float8": int(self.closely)}

    def watching(self) -> FakeProbe:
        self.watched += 1
        return self

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record_operators(self, *, on: bool) -> None:
        self.closely = on

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class RecordingDriver(Driver):
    """Driver whose five methods only record their calls."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: list[Any] = []

    def build_model(self) -> Any:
        return "build_model"

    def build(self, model: Any) -> None:
        self.calls.append(("build", model))

    def step(self, number: int) -> float:
        self.calls.append(("step", number))
        return 1.0 / number

    def save(self, directory: Path) -> None:
        self.calls.append(("save", directory.name))

    def load(self, directory: Path) -> None:
        self.calls.append(("load", directory.name))


class Callbacks(RecordingDriver):
    """A trainer that does all actions in one call, and reports ``reported``."""

    reported: tuple[str, ...] = ()
    plans: tuple[Plan, ...] = ()

    def train(self, model: Any, plan: Plan, report: OnAction) -> None:
        self.plans = (*self.plans, plan)
        for action in self.reported or plan.actions:
            if action == "step":
                report(action, 0.5)
            else:
                report(action)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> FakeProbe:
    """Replace the probe and the rank log: there is no model to read."""
    monkeypatch.setattr(Rank, "_snapshot", lambda self, whole: {"tokens": int(whole)})
    for action in ("_files", "_export", "_evaluate"):
        monkeypatch.setattr(Rank, action, lambda self: {})
    monkeypatch.setattr(Rank, "_attach", lambda self, model: {})
    return FakeProbe()


def run_plan(driver: type[Driver], run: Run, probe: FakeProbe, **attributes: Any) -> Any:
    """Run the plan on rank 0 of 2 and return the driver."""
    made = driver(Cell.parse("ddp-fp32-w2"), World(0, 2, 0, "cpu"))
    vars(made).update(attributes)
    run_paths = RunPaths(Path("new"), Path("old"), Path("whole"), 2)
    Rank(made, run, run_paths, probe, probe).perform()  # type: ignore[arg-type]  # stands for both
    return made


def test_a_driver_of_five_methods_is_called_one_by_one(probe: FakeProbe) -> None:
    driver = run_plan(RecordingDriver, SHORT, probe)
    assert driver.calls == [("build", "build_model"), ("step", 3), ("save", "new"), ("step", 4)]
    assert probe.actions == list(SHORT.actions)
    for index, fields in enumerate(probe.snapshots):
        assert fields["index"] == index
    losses = [snapshot["loss"] for snapshot in probe.after("step")]
    assert losses == [1 / 3, 1 / 4]


@pytest.mark.parametrize("tokens", [3, 3.0, torch.tensor(3), np.int64(3)])
def test_tokens_may_be_a_tensor(probe: FakeProbe, tokens: Any) -> None:
    """A tensor, which no line of JSON holds, ended the rank."""
    run_plan(RecordingDriver, SHORT, probe, tokens=tokens)
    first, second = probe.after("step")
    assert first["tokens"] == 3
    assert second["tokens"] == 3


@pytest.mark.parametrize("action", ["build_model", "build", "step", "save", "load"])
def test_a_missing_method_is_named(probe: FakeProbe, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingDriver, action, getattr(Driver, action))
    run = RESUME_RUN if action == "load" else SHORT
    message = rf"^RecordingDriver has no {action}\(\); a driver needs build_model, build, step"
    with pytest.raises(NotImplementedError, match=message):
        run_plan(RecordingDriver, run, probe)


def test_a_resumed_run_loads_from_the_saved_directory(probe: FakeProbe) -> None:
    driver = run_plan(RecordingDriver, RESUME_RUN, probe)
    assert driver.calls == [("build", "build_model"), ("load", "old"), ("step", 3), ("step", 4)]


class ReadsRows(RecordingDriver):
    """Driver that records where its loaders begin."""

    loaders: ClassVar[Mapping[str, Loader]] = {
        "all": Loader(),
        "between epochs": Loader(midway=False),
        "never": Loader(resumes=False),
    }

    def rows(self, loader: str, count: int, start: tuple[int, int], directory: Path) -> Iterator[Any]:
        self.calls.append((loader, start, count, directory.name))
        return iter(())


def test_loaders_resume_where_they_can(probe: FakeProbe) -> None:
    driver = run_plan(ReadsRows, RESUMED_ROWS_RUN, probe)
    assert driver.calls == [
        ("all", (1, 0), ROWS, "old"),
        ("all", (1, 2), ROWS, "old"),
        ("between epochs", (1, 0), ROWS, "old"),
    ]


class Lacks(ReadsRows):
    """Driver that cannot make one of its loaders."""

    def rows(self, loader: str, *start: Any) -> Iterator[Any]:
        yield from super().rows(loader, *start)
        if loader == "between epochs":
            raise ValueError("no such sampler\nknown: a, b")


def reported(log: RankLog, driver: Driver, actions: tuple[str, ...]) -> Error:
    """Perform the actions on a rank that fails, and return the error that it logs."""
    run_paths = RunPaths(log.path.parent, log.path.parent, log.path.parent, 2)
    with pytest.raises(ValueError, match="no such sampler") as caught:
        Rank(driver, Run("rows", actions), run_paths, FakeProbe(), log).perform()  # type: ignore[arg-type]
    report_error(log, caught.value)
    (error,) = of_kind(Error, read_events(log.path.parent, 0))
    return error


def test_an_error_names_the_loader(tmp_path: Path) -> None:
    """Only one of them all is wrong; which one the traceback of a shared function does not show."""
    driver = Lacks(Cell.parse("ddp-fp32-w2"), World(0, 2, 0, "cpu"))
    with contextlib.closing(RankLog(tmp_path, 0)) as log:
        error = reported(log, driver, ("rows",))
    assert error.message.splitlines() == [
        "ValueError: no such sampler (in rows() of the loader 'between epochs')",
        "known: a, b",
    ]
    assert error.kind == "ValueError"
    assert [loader for loader, *_ in driver.calls] == ["all", "between epochs"], "another rank may be in the second"


def test_an_error_after_the_loaders_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def metrics(self: Rank) -> dict[str, Any]:
        raise ValueError("no such sampler")

    monkeypatch.setattr(Rank, "_metrics", metrics)
    driver = ReadsRows(Cell.parse("ddp-fp32-w2"), World(0, 2, 0, "cpu"))
    with contextlib.closing(RankLog(tmp_path, 0)) as log:
        error = reported(log, driver, ("rows", "metrics"))
    assert error.message == "ValueError: no such sampler"


def test_all_of_a_training_is_one_plan(probe: FakeProbe) -> None:
    driver = run_plan(Callbacks, TRAIN_RUN, probe)
    (plan,) = driver.plans
    assert plan.actions == ("build", *("step",) * 3, "save", *("step",) * 17)
    assert plan.first_step == 0
    assert plan.last_step == 20
    assert plan.save_to.name == "new"
    # Files are read in between, without the trainer's doing.
    assert probe.actions == list(TRAIN_RUN.actions)
    assert probe.watched == 1


def test_the_first_steps_are_probed_in_full(probe: FakeProbe) -> None:
    run_plan(Callbacks, TRAIN_RUN, probe)
    (built,) = probe.after("build")
    assert built["tokens"] == 1


@pytest.mark.parametrize("driver", [RecordingDriver, Callbacks])
@pytest.mark.parametrize(
    ("run", "cell", "steps"),
    [
        (TRAIN_RUN, "ddp-fp32-w2", [2]),
        (TRAIN_RUN, "ddp-fp32-w2-grad_accum_4", list(range(20))),
        (dataclasses.replace(SHORT, first_step=0), "ddp-fp32-w2", [1]),
        (RESUME_RUN, "ddp-fp32-w2", []),
        (RESUME_RUN, "ddp-fp32-w2-grad_accum_4", []),
    ],
    ids=["new", "accumulates", "short", "goes on", "goes on and accumulates"],
)
def test_operators_are_recorded_in_as_few_steps_as_needed(
    probe: FakeProbe, driver: type[Driver], run: Run, cell: str, steps: list[int]
) -> None:
    # The loss of step number 0.
    run_plan(driver, run, probe, cell=Cell.parse(cell), step=lambda number: 0.5)
    recorded = [number for number, snapshot in enumerate(probe.after("step")) if snapshot["float8"]]
    assert recorded == steps
    for fields in probe.snapshots:
        if fields["action"] != "step":
            assert not fields["float8"], "nothing else is"


@pytest.mark.parametrize(
    ("reported", "message"),
    [
        (("step",), "reported 'step'; the next action of the plan is 'build'"),
        (("build", "save"), "reported 'save'; the next action of the plan is 'step'"),
        (("build", "step", "step"), "reported 'step'; the next action of the plan is 'save'"),
        (("build", "step", "save", "step", "step"), "reported 'step'; the plan is done"),
        (("build", "step", "save", "step", "export"), "reported 'export'; the plan is done"),
        (("build", "step", "save"), "came back before 'step' was seen"),
        (("build",), "came back before 'step' was seen"),
    ],
)
def test_a_trainer_that_does_not_keep_to_the_plan(probe: FakeProbe, reported: tuple[str, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^the driver's train\(\) {message}"):
        run_plan(Callbacks, SHORT, probe, reported=reported)


def test_a_trainer_that_continues_after_the_plan(probe: FakeProbe) -> None:
    reported = ("build", "load", "step", "step", "step")
    with pytest.raises(RuntimeError, match=r"reported 'step'; the plan is done"):
        run_plan(Callbacks, RESUME_RUN, probe, reported=reported)


def test_the_held_out_batch_makes_no_graph_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The probe wants a module.
    monkeypatch.setattr(Rank, "_attach", lambda self, model: {})
    torch = pytest.importorskip("torch")
    compiled: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    class Compiles(RecordingDriver):
        def build_model(self) -> Any:
            return torch.compile(lambda x: x + 1, backend=backend)

        def evaluate(self, model: Any) -> Any:
            return model(torch.zeros(2))

    probe = FakeProbe()
    driver = Compiles(Cell.parse("fsdp2-fp32-w2-compile"), World(0, 1, 0, "cpu"))
    run = Run("one", ("build_model", "evaluate"))
    rank = Rank(driver, run, RunPaths(tmp_path, tmp_path, tmp_path, 1), probe, probe)  # type: ignore[arg-type]
    rank.perform()
    assert probe.snapshots[1]["outputs"] == (1.0, 1.0)
    assert not compiled
    driver.evaluate(driver.build_model())
    assert len(compiled) == 1, "it is compiled where nobody says otherwise"


def test_what_a_trainer_does_to_products_of_a_gpu_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "read_rng", lambda device: "")  # there is none without a GPU
    flags = SimpleNamespace()
    monkeypatch.setattr(torch.backends.cuda, "matmul", flags)
    monkeypatch.setattr(FakeProbe, "without_gradient", lambda self: frozenset(), raising=False)

    class TurnsTf32On(RecordingDriver):
        def build_model(self) -> Any:
            return torch.nn.Linear(2, 2)

        def build(self, model: Any) -> None:
            self.model = model
            flags.fp32_precision = "tf32"

    for device, expected in (("cpu", [None, None]), ("cuda:0", ["ieee", "tf32"])):
        flags.fp32_precision = "ieee"
        probe = FakeProbe()
        driver = TurnsTf32On(Cell.parse("ddp-fp32-w1-compile_aot_eager"), World(0, 1, 0, device))
        run_paths = RunPaths(tmp_path, tmp_path, tmp_path, 1)
        run = Run("one", ("build_model", "build"))
        Rank(driver, run, run_paths, probe, probe).perform()  # type: ignore[arg-type]
        for fields, precision in zip(probe.snapshots, expected, strict=True):
            products = fields.get("products", {})
            assert products.get("matmul") == precision


def test_importing_the_worker_reads_all_registries() -> None:
    """Ranks are forked from a process that has imported it, and would each list the packages again."""
    code = (
        "from pytest_distcompat import worker\n"
        "from pytest_distcompat.registry import Registry\n"
        "for name, value in vars(worker).items():\n"
        "    if isinstance(value, Registry) and 'by_name' in vars(value):\n"
        "        print(name)\n"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    read = completed.stdout.split()
    assert set(read) >= {"DRIVERS", "MODELS", "PRECISIONS", "STRATEGIES"}


@pytest.mark.parametrize(
    ("run", "scale"),
    [
        (SHORT, 1024.0),
        # The load is to bring the scale.
        (RESUME_RUN, 65536.0),
        # Another strategy's checkpoint may have none.
        (dataclasses.replace(RESUME_RUN, strategy="fsdp2"), 1024.0),
    ],
)
def test_the_first_scale_of_a_run(probe: FakeProbe, run: Run, scale: float) -> None:
    driver = run_plan(RecordingDriver, run, probe, scaler=torch.amp.GradScaler("cpu"))
    assert driver.scaler.state_dict()["scale"] == scale


class TrainsTwice(RecordingDriver):
    """A trainer that can begin a second training."""

    def step(self, number: int) -> float:
        self.calls.append(("step", number))
        return 0.5

    def again(self) -> None:
        self.calls.append(("again", ""))


def test_each_training_of_one_trainer_counts_its_own_steps(probe: FakeProbe) -> None:
    """After the load of a checkpoint of the first one the steps are those that followed the save."""
    actions = ("build", "step", "step", "save", "step", "again", "step", "load", "step", "step")
    driver = run_plan(TrainsTwice, Run("again", actions), probe, unwrapped=None)
    steps = [number for action, number in driver.calls if action == "step"]
    assert steps == [0, 1, 2, 0, 2, 3]
