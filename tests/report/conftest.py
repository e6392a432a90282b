"""Reports of a real run, and sessions whose ranks are made up."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.report.document import Report
from pytest_distcompat.report.write import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: Debian's, or what the runners of GitHub have.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is on the PATH (apt-get install chromium)")

#: What faulty/ gave, shortened: a run with every kind of ending.
REAL = Path(__file__).with_name("real.json")

#: A suite with one check, whose runs are made up by LAUNCHER: what becomes of them stands in RUNS.
SUITE = """
from pytest_distcompat import CompatSuite, Driver, Matrix, fails
from pytest_distcompat.expect import may_fail

class Mine(Driver):
    name = "mine"

    @classmethod
    def unsupported_reason(cls, cell, device="cpu"):
        return "mine has no bf16_pure" if cell.precision == "bf16_pure" else ""

class TestMine(CompatSuite):
    driver = "test_mine:Mine"
    matrix = Matrix(("ddp", "fsdp1", "fsdp2"), ("fp32", "bf16_upcast", "bf16_pure"))
    expect = (
        fails("claim", strategy="fsdp1", precision="bf16_upcast", reason="org/repo#1"),
        may_fail("claim", strategy="fsdp2", precision="bf16_upcast", reason="org/repo#2", match="rank 7 is odd"),
    )
"""
LAUNCHER = '''
"""No process is started: a run takes as long, and ends, as runs.json says of its cell."""
import dataclasses, json, os, pathlib, time

from pytest_distcompat.checks import CHECKS, Check
from pytest_distcompat.launch.forensics.ending import Ending, RankEnd
from pytest_distcompat.launch.torchrun import LAUNCHERS, TorchrunLauncher
from pytest_distcompat.events import Action, SnapshotTaken
from pytest_distcompat.launch.rank_log import RankLog
from pytest_distcompat.plugin.marked.phase import Phase
from pytest_distcompat.scenario import TRAIN

HERE = pathlib.Path(__file__).parent
#: What looks like another rank's is still its own.
WORDS = "rank 0: the last words of rank 1"
RUNS = json.loads((HERE / "runs.json").read_text())


def claim(cell, trace):
    """Nothing is wrong."""
    if RUNS.get(cell.id) == "wrong":
        yield "rank 1: something is wrong"


class Made(TorchrunLauncher):
    def run(self, request):
        request.write()
        if "cell" not in request.payload:
            phases = [Phase(when, "passed") for when in ("setup", "call", "teardown")]
            ranks = range(request.world_size)
            return Ending(tuple(RankEnd(rank, "done") for rank in ranks), {rank: phases for rank in ranks})
        outcome = RUNS.get(request.payload["cell"], "")
        events = []
        for index, action in enumerate(("build_model", "build", "step")):
            snapshot = {"rank": 0, "run": "train", "action": action, "index": index, "loss": 4.0 if action == "step" else None}
            RankLog(request.directory, 0).write(Action(action, index))
            if action == "step" and str(outcome).startswith("wait"):
                (HERE / "waiting").touch()
                time.sleep(float(outcome.split()[1]))
            # As a rank says it: reports are made of what stands in its log.
            taken = SnapshotTaken(action, index, snapshot)
            RankLog(request.directory, 0).write(taken)
            events.append(taken)
        if outcome == "killed":
            ends = RankEnd(1, "killed", "was killed by SIGKILL during 'step'", output=WORDS), RankEnd(0, "stopped", "was killed by SIGTERM")
            return Ending(ends, {0: events[:2], 1: []}, seconds=1.5, command="torchrun ...")
        if outcome == "raised":
            ends = RankEnd(1, "raised", "raised ValueError: no", "Traceback"), RankEnd(0, "stopped", "was killed by SIGTERM")
            return Ending(ends, {0: events[:2], 1: []}, seconds=0.5, command="torchrun ...")
        return Ending((RankEnd(0, "done"), RankEnd(1, "done")), {0: events, 1: []}, seconds=0.5, command="torchrun ...")


LAUNCHERS["warm"] = Made
CHECKS.names()
CHECKS.by_name = {"claim": Check("claim", TRAIN, (("train", "step", 0),), claim)}
'''


@pytest.fixture
def real() -> Report:
    """A real run, read."""
    return Report.read(REAL)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the outer run, on whatever machine: no GPU, no summary of a workflow's step, no leases of other runs."""
    for name in [name for name in os.environ if name.startswith(("PYTEST_", "GITHUB_", "CUDA_"))]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))


#: Runs pytest in that directory with these arguments, as a process.
Session = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """Run pytest on the suite; ``runs`` says what becomes of which cell's runs."""

    def run(*args: str, runs: str = "{}", **env: str) -> subprocess.CompletedProcess[str]:
        write_session(tmp_path, runs)
        return subprocess.run(
            command(tmp_path, *args),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, **env},
        )

    return run


def command(directory: Path, *args: str) -> list[str]:
    """The command that runs the suite there."""
    base = f"--basetemp={directory / 'base'}"
    return [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:randomly",
        "-p",
        "no:hypothesispytest",
        "-p",
        "no:cacheprovider",
        base,
        *args,
    ]


def write_session(directory: Path, runs: str) -> None:
    """Put the suite there."""
    (directory / "test_mine.py").write_text(SUITE, encoding="utf-8")
    (directory / "conftest.py").write_text(LAUNCHER, encoding="utf-8")
    (directory / "runs.json").write_text(runs, encoding="utf-8")
    (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclasses.dataclass
class Opened:
    """A page, and what went wrong on it."""

    page: Page
    wrong: list[str]

    def __call__(self, script: str) -> Any:
        return self.page.evaluate(script)

    def wait_for(self, script: str) -> None:
        """Wait until that is true. The policy of the page lets playwright's own polling evaluate no text a second time."""
        for _ in range(100):
            if self(script):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"not true within 5 s: {script}")

    def verdict(self, place: str) -> Any:
        return self.page.locator(f".matrix .verdict[data-place$='{place}']")


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Any]:
    """Write a report as a page and open it; no page may complain or ask for anything."""
    pages: list[Opened] = []

    def open_(report: Report, *, width: int = 1400, scheme: Any = "light", fragment: str = "") -> Opened:
        path = tmp_path / f"{len(pages)}.html"
        write_report(path, report)
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        made = Opened(page, [])
        pages.append(made)
        page.on("console", lambda message: made.wrong.append(message.text))
        page.on("pageerror", lambda error: made.wrong.append(str(error)))
        page.on("request", lambda request: None if request.url == page.url else made.wrong.append(request.url))
        page.goto(f"file://{path}{fragment}")
        # Its script unpacks the report first.
        page.locator("#shown:not(:empty)").wait_for()
        return made

    yield open_
    for opened_page in pages:
        # The page itself is the only request.
        assert [text for text in opened_page.wrong if not text.startswith("file://")] == []
        opened_page.page.close()
