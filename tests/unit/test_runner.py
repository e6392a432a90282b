"""Which runs are run, where, and what they find there; by a launcher that starts no process."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.launchers import WithoutProcesses

from pytest_distcompat.cell import Cell
from pytest_distcompat.events import Action, Done, Event, SnapshotTaken
from pytest_distcompat.launch.forensics.ending import Ending, RankEnd
from pytest_distcompat.launch.rank_log import RankLog
from pytest_distcompat.launch.request import Request
from pytest_distcompat.runner import Runner, rank_reports, run_trace
from pytest_distcompat.scenario import DAMAGE, EXPORT, PARITY, RESUME, TRAIN, TRAIN_RUN, Run, Scenario


@dataclass
class Ranks(WithoutProcesses):
    """Every rank does all actions, but in the run of that name all end with an exception in that action."""

    broken: dict[str, str] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)

    def run(self, request: Request) -> Ending:
        self.requests.append(request)
        run = request.payload["run"]
        if "save" in run["actions"]:
            (Path(request.payload["save_to"]) / "shard").write_text("whole", encoding="utf-8")
        broken = self.broken.get(run["name"], "")
        events = {}
        ends = []
        for rank in range(request.world_size):
            events[rank] = list(rank_events(run, rank, broken))
            with contextlib.closing(RankLog(request.directory, rank)) as log:
                for event in events[rank]:
                    log.write(event)
            if broken:
                ends.append(RankEnd(rank, "raised", "raised ValueError: x"))
            else:
                ends.append(RankEnd(rank, "done"))
        return Ending(tuple(ends), events, command="torchrun ...")

    @property
    def ran(self) -> list[tuple[str, str]]:
        """Return each run, with the cell in which it ran."""
        return [(name_of(request), request.payload["cell"]) for request in self.requests]

    @property
    def run_names(self) -> list[str]:
        return [name_of(request) for request in self.requests]

    def requests_of(self, name: str) -> list[Request]:
        """Return the requests for the run of that name."""
        return [request for request in self.requests if name_of(request) == name]


def name_of(request: Request) -> str:
    """Return the name of the run that is requested."""
    name: str = request.payload["run"]["name"]
    return name


def rank_events(run: dict[str, Any], rank: int, broken: str) -> Iterator[Event]:
    for index, action in enumerate(run["actions"]):
        yield Action(action, index)
        if action == broken:
            return
        snapshot = {"rank": rank, "run": run["name"], "action": action, "index": index}
        yield SnapshotTaken(action, index, snapshot)
    yield Done()


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def runner(tmp_path: Path, ranks: Ranks) -> Runner:
    return Runner(tmp_path / "store", ranks, device="cpu", timeout=1)


def cells(*names: str) -> Iterator[Cell]:
    return map(Cell.parse, names)


@pytest.mark.parametrize(("device", "value"), [("cpu", None), ("cpu", "4"), ("cuda", None)])
def test_a_single_rank_on_the_cpu_uses_one_thread(
    device: str, value: str | None, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By the environment, where accelerate looks: a number of threads that is only set, it sets again.
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    runner = Runner(tmp_path / "store", ranks, device=device, timeout=1)
    runner.trace("torch", Cell.parse("fsdp2-fp32-w2"), PARITY)
    train, reference = ranks.requests
    assert name_of(train) == "train"
    assert train.world_size == 2
    assert dict(train.set) == {}
    assert name_of(reference) == "reference"
    assert reference.world_size == 1
    if device == "cpu" and value is None:
        assert dict(reference.set) == {"OMP_NUM_THREADS": "1"}
    else:
        assert dict(reference.set) == {}


def test_variables_of_a_cell_are_those_that_its_ranks_start_with(runner: Runner, ranks: Ranks) -> None:
    runner.trace("torch", Cell.parse("ddp-fp32-w2-set_env.OMP_NUM_THREADS=7+env.NAME=value"), TRAIN)
    (train,) = ranks.requests
    assert dict(train.set) == {"OMP_NUM_THREADS": "7", "NAME": "value"}


def test_another_process_reads_what_the_ranks_wrote(runner: Runner, ranks: Ranks) -> None:
    cell = Cell.parse("fsdp2-fp32-w2")
    ran = runner.trace("d", cell, TRAIN)
    other_runner = Runner(runner.store, ranks, device="cpu", timeout=1)
    read = other_runner.trace("d", cell, TRAIN)
    assert len(ranks.requests) == 1
    assert len(ran.run().snapshots) == 2 * len(TRAIN_RUN.actions)
    assert read == ran


def test_files_of_an_earlier_session_are_removed(runner: Runner, ranks: Ranks) -> None:
    cell, other = cells("fsdp2-fp32-w2", "ddp-fp32-w2")
    for chosen in (cell, other):
        runner.trace("d", chosen, RESUME)
    later = Runner(runner.store, ranks, device="cpu", timeout=1)
    for scenario in (RESUME, PARITY):
        later.forget("d", cell, scenario)
    for chosen in (cell, other):
        later.trace("d", chosen, RESUME)
    assert ranks.ran == [
        ("train", "fsdp2-fp32-w2"),
        ("resume", "fsdp2-fp32-w2"),
        ("train", "ddp-fp32-w2"),
        ("resume", "ddp-fp32-w2"),
        ("train", "fsdp2-fp32-w2"),
        ("resume", "fsdp2-fp32-w2"),
    ]


def test_scenarios_share_their_runs(runner: Runner, ranks: Ranks) -> None:
    for scenario in (TRAIN, RESUME, PARITY, RESUME):
        trace = runner.trace("d", Cell.parse("fsdp2-fp32-w2"), scenario)
        names = [run.name for run in trace]
        assert names == [run.name for run in scenario.runs]
    assert ranks.ran == [("train", "fsdp2-fp32-w2"), ("resume", "fsdp2-fp32-w2"), ("reference", "ddp-fp32-w1")]


def test_one_reference_for_all_strategies(runner: Runner, ranks: Ranks) -> None:
    names = ("ddp-fp32-w2", "zero3-fp32-w2", "fsdp2-fp32-w2-compile", "fsdp1-fp32-w2-state_dict_full")
    references = set()
    for cell in cells(*names):
        trace = runner.trace("d", cell, PARITY)
        references.add(str(trace.run("reference")))
    assert len(references) == 1
    assert ranks.ran.count(("reference", "ddp-fp32-w1")) == 1


def test_a_reference_of_its_own_for_other_data_another_model_or_another_driver(runner: Runner, ranks: Ranks) -> None:
    for cell in cells("ddp-fp32-w2", "ddp-fp32-w4", "ddp-bf16_upcast-w2", "ddp-fp32-w2-model_mlp"):
        runner.trace("d", cell, PARITY)
    runner.trace("other", Cell.parse("ddp-fp32-w2"), PARITY)
    references = ranks.requests_of("reference")
    data_ranks = [request.payload["ranks"] for request in references]
    assert data_ranks == [2, 4, 2, 2, 2]
    for request in references:
        assert request.world_size == 1


def test_a_run_that_others_know_under_another_name_runs_once(runner: Runner, ranks: Ranks) -> None:
    alias = Run("baseline", TRAIN_RUN.actions, strategy="ddp", only=(), same_as="train")
    runner.trace("d", Cell.parse("ddp-fp32-w2"), TRAIN)
    scenario = Scenario("s", (TRAIN_RUN, alias))
    trace = runner.trace("d", Cell.parse("fsdp2-fp32-w2-compile"), scenario)
    assert ranks.ran == [("train", "ddp-fp32-w2"), ("train", "fsdp2-fp32-w2-compile")]
    assert trace.run("baseline").name == "baseline"
    assert trace.run("baseline").cell == "ddp-fp32-w2"


@pytest.mark.parametrize(("broken", "resumed"), [("save", False), ("build", False), ("files", True), ("export", True)])
def test_a_saved_checkpoint_can_be_resumed(runner: Runner, ranks: Ranks, broken: str, *, resumed: bool) -> None:
    ranks.broken["train"] = broken
    trace = runner.trace("d", Cell.parse("ddp-fp32-w2"), RESUME)
    train = trace.run("train").end
    resume = trace.run("resume").end
    assert train is not None
    assert train.kind == "raised"
    assert train.action == broken
    if resumed:
        assert ranks.run_names == ["train", "resume"]
        assert resume is None
    else:
        assert ranks.run_names == ["train"]
        assert resume == train


@pytest.mark.parametrize(("broken", "reloaded"), [("export", False), ("evaluate", True)])
def test_an_export_can_be_loaded(runner: Runner, ranks: Ranks, broken: str, *, reloaded: bool) -> None:
    ranks.broken["train"] = broken
    runner.trace("d", Cell.parse("ddp-fp32-w2"), EXPORT)
    expected = ["train", "reload"] if reloaded else ["train"]
    assert ranks.run_names == expected


def test_a_corrupted_checkpoint_is_a_copy(runner: Runner, ranks: Ranks) -> None:
    cell = Cell.parse("fsdp2-fp32-w2")
    runner.trace("d", cell, DAMAGE)
    train, *damaged = ranks.requests
    original = Path(train.payload["save_to"])
    for request in damaged:
        assert Path(request.payload["load_from"]) == original
        copy = Path(request.payload["save_to"])
        assert copy != original
        assert (copy / "shard").read_text(encoding="utf-8") == "whole"
    # Who goes on from it afterwards finds the original.
    runner.trace("d", cell, RESUME)
    assert Path(ranks.requests[-1].payload["load_from"]) == original
    assert ranks.requests[-1].payload["run"]["name"] == "resume"


def test_a_run_that_goes_on_elsewhere_belongs_to_where_it_comes_from(runner: Runner, ranks: Ranks) -> None:
    port = Run("port", ("build_model", "build", "load"), after="train", strategy="fsdp2")
    for cell in cells("ddp-fp32-w2", "fsdp1-fp32-w2"):
        runner.trace("d", cell, Scenario("portable", (TRAIN_RUN, port)))
    from_ddp, from_fsdp1 = ranks.requests_of("port")
    assert from_ddp.payload["cell"] == "fsdp2-fp32-w2"
    assert from_fsdp1.payload["cell"] == "fsdp2-fp32-w2"
    assert from_ddp.payload["load_from"] != from_fsdp1.payload["load_from"]
    assert from_ddp.directory != from_fsdp1.directory


def test_a_run_that_was_broken_off_with_its_pytest_begins_anew(runner: Runner, ranks: Ranks, tmp_path: Path) -> None:
    cell = Cell.parse("ddp-fp32-w2")
    runner.trace("d", cell, TRAIN)
    (directory,) = (path for path in runner.store.iterdir() if path.is_dir())
    (directory / "run.json").unlink()
    (directory / "rank-0.jsonl").write_text("left over", encoding="utf-8")
    again = Runner(tmp_path / "store", ranks, device="cpu", timeout=1)
    again.trace("d", cell, TRAIN)
    assert len(ranks.requests) == 2
    assert "left over" not in (directory / "rank-0.jsonl").read_text(encoding="utf-8")


def test_stored_ranks_of_a_run_have_the_cause_first(tmp_path: Path) -> None:
    stack = 'Current thread 0x1 (most recent call first):\n  File "mine.py", line 3 in step'
    ends = (
        RankEnd(0, "lost peer", "raised RuntimeError: Connection closed by peer", "Traceback", time=2),
        RankEnd(1, "raised", "raised ValueError: no", "--- rank 0: fake ---\nValueError: no", time=1),
        RankEnd(2, "stuck", "was still running", stack=stack, output="words"),
        RankEnd(3, "done"),
    )
    reports = rank_reports(Ending(ends, {}))
    raised, stuck, lost_peer = reports
    assert raised["rank"] == 1
    assert raised["status"] == "raised"
    assert raised["text"] == "--- rank 0: fake ---\nValueError: no"
    assert stuck["rank"] == 2
    assert stuck["status"] == "stuck"
    assert stuck["text"] == ""
    assert "mine.py" in stuck["stack"]
    assert stuck["output"] == "words"
    assert lost_peer["rank"] == 0
    assert lost_peer["status"] == "lost peer"
    assert lost_peer["text"] == "Traceback"
    assert rank_reports(Ending((RankEnd(0, "done"),), {})) == []


def test_a_failed_launch_blames_no_rank(tmp_path: Path) -> None:
    ending = Ending((RankEnd(0, "missing", "never started"),), {}, launch_error="Traceback\nOSError: no port")
    first, second = rank_reports(ending)
    assert first["rank"] is None
    assert first["message"] == "the ranks could not be started: OSError: no port"
    assert second["rank"] == 0
    end = run_trace("train", ending, Cell.parse("ddp-fp32-w1")).end
    assert end is not None
    assert end.rank is None


def test_the_rank_of_the_cause_is_kept_with_the_run(tmp_path: Path) -> None:
    ends = (RankEnd(0, "stopped", "was killed"), RankEnd(1, "killed", "was killed by SIGKILL"))
    end = run_trace("train", Ending(ends, {}), Cell.parse("ddp-fp32-w2")).end
    assert end is not None
    assert end.rank == 1


def test_runs_whose_files_are_on_each_node(tmp_path: Path, ranks: Ranks) -> None:
    cell = Cell.parse("ddp-fp32-w2-n2-checkpoints_node")
    for worker in ("gw0", "gw1"):
        runner = Runner(tmp_path / "store", ranks, device="cpu", timeout=1, worker=worker)
        for scenario in (EXPORT, PARITY):
            runner.trace("trainer", cell, scenario)
    started = []
    for request in ranks.requests:
        started.append((name_of(request), request.nodes, request.payload["own_disks"]))
    # What is exported is on the first node. The reference loads nothing, and both workers may read it.
    assert started == [
        ("train", 2, True),
        ("reload", 1, True),
        ("reference", 1, False),
        ("train", 2, True),
        ("reload", 1, True),
    ]


def test_runs_of_one_node_have_one_directory(runner: Runner, ranks: Ranks) -> None:
    runner.trace("trainer", Cell.parse("ddp-fp32-w2-checkpoints_node"), RESUME)
    train, resume = ranks.requests
    assert train.payload["own_disks"] is False
    assert resume.payload["own_disks"] is False


@pytest.mark.parametrize("removed", ["store", "files"])
def test_a_run_whose_files_were_removed_runs_again(runner: Runner, ranks: Ranks, removed: str) -> None:
    """A later run loads the checkpoint of an earlier one, which a cleaner of temporary files may have removed."""
    cell = Cell.parse("ddp-fp32-w2")
    runner.trace("torch", cell, TRAIN)
    if removed == "store":
        shutil.rmtree(runner.store)
    else:
        for path in runner.store.rglob("*"):
            if path.is_file():
                path.unlink()
    trace = runner.trace("torch", cell, RESUME)
    assert ranks.run_names == ["train", "train", "resume"]
    for run in trace.runs.values():
        assert run.end is None
