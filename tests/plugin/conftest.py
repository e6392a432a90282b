"""Pytest inside pytest: in this process with hand-made ranks, or as a process of its own with real ones."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.pytest_runs import RECORDED, reports
from tests.pytest_runs import Run as RunOfPytest

import pytest_distcompat.plugin.marked.run
import pytest_distcompat.plugin.reporting.results

# Imported before any run in this process: pytester takes out of sys.modules what such a run imports.
import pytest_distcompat.plugin.suite.cases
import pytest_distcompat.plugin.suite.order
import pytest_distcompat.plugin.suite.run
import pytest_distcompat.runner  # noqa: F401
from pytest_distcompat import devices
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.launch.forensics.ending import Ending, RankEnd
from pytest_distcompat.launch.request import Request, Warmth
from pytest_distcompat.launch.torchrun import LAUNCHERS
from pytest_distcompat.models import MODELS
from pytest_distcompat.plugin.marked.phase import Phase
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES

for registry in (CHECKS, DRIVERS, MODELS, PRECISIONS, STRATEGIES):
    assert registry.by_name


@dataclass(frozen=True)
class Run(RunOfPytest):
    """Result and output of one pytest process."""

    def text(self, name: str) -> str:
        return str(self.of(name)["text"])

    def sections(self, name: str) -> dict[str, str]:
        return dict(self.of(name)["sections"])

    def command(self, name: str, title: str) -> str:
        """Return the command that the failure's text shows after that title."""
        lines = [line for line in self.text(name).splitlines() if line.startswith(title + ": ")]
        assert len(lines) == 1, self.text(name)
        return lines[0].removeprefix(title + ": ")


RunPytest = Callable[..., Run]
Torchrun = Callable[..., Run]


def recorded(directory: Path, line: Sequence[str], environment: Mapping[str, str]) -> Run:
    """Run Python with that command line, which starts a pytest with ``RECORDED``, in that directory."""
    # A test may run pytest in one directory twice.
    (directory / "reports.jsonl").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, *line],
        cwd=directory,
        env={**environment, "RECORDED_REPORTS": str(directory / "reports.jsonl")},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    return Run(done.returncode, done.stdout + done.stderr, directory, reports(directory))


@pytest.fixture(scope="session")
def run_pytest(environment: dict[str, str]) -> RunPytest:
    """Run pytest in that directory, as a process with a base temporary directory of its own."""

    def run(directory: Path, *args: str) -> Run:
        return recorded(
            directory, ["-m", "pytest", *RECORDED, f"--basetemp={directory / 'basetemp'}", *args], environment
        )

    return run


@pytest.fixture(scope="session")
def torchrun(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Torchrun:
    """Run a file of tests on two ranks, in a directory of its own."""

    def run(source: str | Path, *args: str, known: str = "") -> Run:
        directory = tmp_path_factory.mktemp("inside")
        if isinstance(source, Path):
            shutil.copy(source, directory / "test_launch.py")
        else:
            (directory / "test_launch.py").write_text(source, encoding="utf-8")
        ini = "distcompat_known = known.toml" if known else ""
        (directory / "known.toml").write_text(known, encoding="utf-8")
        (directory / "pytest.ini").write_text(f"[pytest]\n{ini}", encoding="utf-8")
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
        line = [*launch, "-m", "pytest", *RECORDED, "-p", "no:cacheprovider", *args]
        return recorded(directory, line, {**environment, "TMPDIR": str(directory)})

    return run


#: A rank that failed, in the table that torchrun prints.
_CODES = re.compile(r"rank +: (\d+) .*\n +exitcode +: (-?\d+)")


def codes(run: Run) -> dict[int, int]:
    """Return the exit codes by rank, without those that are 0."""
    return {int(rank): int(code) for rank, code in _CODES.findall(run.out)}


@pytest.fixture(scope="session")
def run_command(environment: dict[str, str]) -> Callable[[str, Path], tuple[int, str]]:
    """Run a command line as a user would paste it; return the exit code and the output."""

    def run(command: str, directory: Path) -> tuple[int, str]:
        done = subprocess.run(
            command,
            shell=True,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return run


#: (driver, cell id) -> names of the checks that have an item in the cell.
ApplicableChecks = Callable[[type[Driver], str], list[str]]
#: (driver, *cell ids) -> number of runs that the cells' items need.
Runs = Callable[..., int]


def _applicable_checks(driver: type[Driver], cell_id: str) -> list[str]:
    cell = Cell.parse(cell_id)
    names = []
    for name, check in CHECKS.by_name.items():
        if check.limit or check.not_applicable(cell, driver):
            continue
        names.append(name)
    return names


@pytest.fixture(scope="session")
def applicable_checks() -> ApplicableChecks:
    """Return the checks of a cell in a session without limits such as ``--distcompat-throughput``."""
    return _applicable_checks


@pytest.fixture(scope="session")
def runs() -> Runs:
    """Count distinct runs: a run that goes on from another belongs to its cell, a reference to all cells."""

    def count(driver: type[Driver], *cell_ids: str) -> int:
        distinct = set()
        for cell_id in cell_ids:
            cell = Cell.parse(cell_id)
            for name in _applicable_checks(driver, cell_id):
                for run in CHECKS.get(name).runs(cell, driver).runs:
                    owner = cell if run.after else cell.world_size
                    distinct.add((run.name, run.cell(cell), owner))
        return len(distinct)

    return count


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's GPUs, and options of the outer pytest."""
    monkeypatch.setattr(devices, "gpu_uuids", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


@dataclass
class FakeRanks:
    """A launcher without processes: it records requests and answers them by ``answer``.

    Its static methods make the answers.
    """

    answer: Callable[[Request], Ending]
    requests: list[Request] = field(default_factory=list)
    can_open: bool = False
    warmth: Warmth | None = None
    calls: list[str] = field(default_factory=list)

    def __call__(self, warmth: Warmth, *, device: str) -> FakeRanks:
        self.warmth = warmth
        self.calls.append(f"made for {device}")
        return self

    def warm_up(self) -> None:
        self.calls.append("warm_up")

    def get_warm(self) -> str:
        return ""

    def run(self, request: Request) -> Ending:
        request.write()
        self.requests.append(request)
        return self.answer(request)

    def close(self) -> None:
        self.calls.append("close")

    @staticmethod
    def phases(**changed: Phase) -> tuple[Phase, ...]:
        """Return the phases of a test that passes, with those given by name instead."""
        return tuple(changed.get(when, Phase(when, "passed")) for when in ("setup", "call", "teardown"))

    @staticmethod
    def well(world_size: int = 2) -> Ending:
        """Return the ending of a run in which all ranks ran the test to its end."""
        ends = [(RankEnd(rank, "done"), FakeRanks.phases()) for rank in range(world_size)]
        return FakeRanks.ending(*ends)

    @staticmethod
    def ending(*ranks: tuple[RankEnd, Sequence[Phase]], **more: Any) -> Ending:
        """Return an ending with these ranks, each with the phases that it wrote."""
        ends = tuple(end for end, _ in ranks)
        phases_by_rank = {end.rank: phases for end, phases in ranks}
        return Ending(ends, phases_by_rank, command="torchrun ...", **more)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> FakeRanks:
    """Start no process: every run ends well, until the test sets another ``answer``."""
    fake = FakeRanks(lambda request: FakeRanks.well(request.world_size))
    monkeypatch.setitem(LAUNCHERS, "warm", fake)
    return fake
