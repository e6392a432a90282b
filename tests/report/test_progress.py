"""Live progress: one line that comes and goes on a terminal, hardly a word in a log."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat import clock
from pytest_distcompat.evidence.progress import running
from pytest_distcompat.plugin.reporting import progress
from pytest_distcompat.report.document import Report
from pytest_distcompat.run_paths import SuitePayload
from pytest_distcompat.scenario import Run
from pytest_distcompat.status import Status, Verdict

from .conftest import command, write_session

if TYPE_CHECKING:
    from .conftest import Session

#: So that a test need not wait for a minute.
HASTE = "from pytest_distcompat.plugin.reporting import progress\nprogress.HEARTBEAT = progress.RENEWED = 0.2\n"


def screen(text: str, columns: int = 120) -> list[str]:
    """Return the final screen of such a terminal; it knows the sequences that we and pytest use."""
    rows = [""]
    row = 0
    column = 0
    for piece in re.findall(r"\x1b\[\d*(?:;\d+)*[A-Za-z]|\r|\n|[^\x1b\r\n]", text):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif piece.endswith("A") and piece.startswith("\x1b"):
            row -= int(piece[2:-1] or 1)
        elif piece.endswith("G") and piece.startswith("\x1b"):
            column = int(piece[2:-1] or 1) - 1
        elif piece == "\x1b[2K":
            rows[row] = ""
        elif not piece.startswith("\x1b"):
            if column == columns:
                row += 1
                column = 0
                rows += [""] * (row + 1 - len(rows))
            before = rows[row].ljust(column)[:column]
            after = rows[row][column + 1 :]
            rows[row] = before + piece + after
            column += 1
    return [row.rstrip() for row in rows]


def on_a_terminal(directory: Path, *args: str) -> str:
    """All that a session wrote to a terminal."""
    write_session(directory, '{"ddp-fp32-w2": "wait 2.5", "fsdp1-bf16_upcast-w2": "wrong"}')
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    process = subprocess.Popen(
        command(directory, *args), cwd=directory, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    assert process.wait(60) in {0, 1}, b"".join(parts).decode()
    return b"".join(parts).decode()


@pytest.mark.parametrize(
    "args",
    [
        (),
        *(pytest.param(args, marks=pytest.mark.nightly) for args in (("-q",), ("-v",), ("-n", "2"), ("-n", "2", "-v"))),
    ],
    ids=" ".join,
)
def test_a_terminal_shows_the_current_run_and_clears_the_line(tmp_path: Path, args: tuple[str, ...]) -> None:
    written = on_a_terminal(tmp_path, *args)
    shown = re.findall(r"ddp-fp32-w2 train: (\w+) (\d+)/(\d+), (\d+) s", written)
    assert shown, written
    longest = 0
    for action, number, _, seconds in shown:
        assert action == "step"
        assert number == "3"
        longest = max(longest, int(seconds))
    assert longest >= 1
    # Before pytest writes anything, the line is taken away, or renewed.
    drawn = re.findall(r"\n\x1b\[2K[^\x1b]+\x1b\[1A\x1b\[\d+G(\r?\n\x1b\[2K)?", written)
    assert drawn
    assert all(drawn), written
    left = "\n".join(screen(written))
    assert " train: step" not in left
    assert "verdicts from" in left
    if args == ("-q",):
        assert re.search(r"^\.\.s\.xs\.\.s  ", left, re.MULTILINE), left


@pytest.mark.nightly
@pytest.mark.parametrize("args", [("-s",), ("-qq",)], ids=" ".join)
def test_no_progress_is_shown_without_capture_or_with_quiet(tmp_path: Path, args: tuple[str, ...]) -> None:
    assert " train: step" not in on_a_terminal(tmp_path, *args)


def test_without_a_terminal_a_short_run_prints_no_progress(session: Session) -> None:
    done = session(runs='{"ddp-fp32-w2": "wait 1.5"}')
    assert "\x1b[" not in done.stdout
    assert " train: step" not in done.stdout


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "1"), marks=pytest.mark.nightly)], ids=["alone", "xdist"])
def test_without_a_terminal_a_long_run_is_reported_now_and_then(
    session: Session, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    (tmp_path / "haste.py").write_text(HASTE, encoding="utf-8")
    done = session("-p", "haste", *workers, runs='{"ddp-fp32-w2": "wait 3"}', PYTHONPATH=str(tmp_path))
    lines = [line for line in done.stdout.splitlines() if line.startswith("distcompat: ddp-fp32-w2 train: ")]
    assert lines, done.stdout
    assert re.fullmatch(r"distcompat: ddp-fp32-w2 train: step 3/\d+, \d+ s of \d+ s", lines[0])
    assert "\x1b[" not in done.stdout


def test_the_shipped_heartbeat_is_no_spam() -> None:
    assert progress.HEARTBEAT >= 60


def make_run(store: Path, name: str, *, ended: bool = False, timeout: float = 300) -> Path:
    directory = store / name
    directory.mkdir(parents=True)
    run = Run("train", ("build_model", "build", "step"))
    payload = SuitePayload("mine", "ddp-fp32-w2", 2, "cpu", run, "saved", "saved", "export")
    request = {"payload": dataclasses.asdict(payload), "timeout": timeout}
    (directory / "request.json").write_text(json.dumps(request), encoding="utf-8")
    if ended:
        (directory / "run.json").write_text("{}", encoding="utf-8")
    return directory


def test_the_current_runs_are_found(tmp_path: Path) -> None:
    over: set[str] = set()
    assert list(running(tmp_path / "nothing", over)) == []
    run = make_run(tmp_path, "one")
    make_run(tmp_path, "two", ended=True)
    (tmp_path / "waits").mkdir()
    (tmp_path / "one.lock").touch()
    (current,) = running(tmp_path, over)
    assert str(current) == "ddp-fp32-w2 train: starts, 0 s of 300 s"
    events = [
        {"event": "action", "action": "build_model", "index": 0},
        {"event": "snapshot", "action": "build_model", "index": 0, "snapshot": {"names": ["x" * 20000]}},
        {"event": "action", "action": "build", "index": 1},
    ]
    log = "".join(f"{json.dumps(event)}\n" for event in events)
    (run / "rank-0.jsonl").write_text(log, encoding="utf-8")
    (current,) = running(tmp_path, over)
    assert current.action == "build"
    assert current.number == 2
    assert current.actions == 3
    assert over == {"two"}
    assert list(running(tmp_path, over, since=time.time() + 60)) == []


def test_the_line_shows_the_progress_of_the_session(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = 0
    now = 100.0
    waits = ""
    monkeypatch.setattr(clock, "now", lambda: now)
    items = [str(number) for number in range(40)]
    forecast = progress.Forecast(None, items)
    shown = progress.Progress(
        pytestconfig,
        tmp_path,
        lambda: (ended, 40),
        lambda passed: forecast.left(items[:ended], passed),
        lambda: waits,
    )
    written: list[str] = []
    monkeypatch.setattr(shown, "_write", written.append)
    monkeypatch.setattr(type(pytestconfig.get_terminal_writer()), "width_of_current_line", 0)
    monkeypatch.setattr(type(pytestconfig.get_terminal_writer()), "fullwidth", 200)
    now = 107.0
    shown._draw([])
    assert "  0 of 40 checks, 7 s; fork servers start: they import the libraries" in written[-1]
    waits = "a.py::test has waited 4 s for 2 of 4 CPU slots: b.py::test (pid 7) has had cpu-0.0 for 9 s"
    shown._draw([])
    assert f"  0 of 40 checks, 7 s; {waits}" in written[-1]
    ended = 10
    now = 120.0
    make_run(tmp_path, "one")
    shown._draw(list(running(tmp_path, set())))
    assert "  10 of 40 checks, 20 s, about 60 s left; ddp-fp32-w2 train: starts, 0 s of 300 s" in written[-1]


def test_a_run_of_a_dead_session_is_not_current(tmp_path: Path) -> None:
    old = make_run(tmp_path, "old", timeout=10)
    then = time.time() - 1000
    os.utime(old / "request.json", (then, then))
    assert list(running(tmp_path, set())) == []


def test_how_long_the_rest_takes_is_known_from_the_last_report() -> None:
    quick = Verdict("k", "c", Status.PASSED, nodeid="quick", seconds=1.0)
    slow = Verdict("k", "c", Status.PASSED, nodeid="slow", seconds=30.0)
    other = Verdict("k", "c", Status.PASSED, nodeid="other", seconds=9.0)
    items = ("quick", "slow", "other")
    # Two workers: 40 seconds of items took 20.
    forecast = progress.Forecast(Report({"seconds": 20.0}, [quick, slow, other]), items)
    assert forecast.left((), 3.0) == 20.0
    assert forecast.left(("quick",), 3.0) == 19.5, "too early for a pace of its own"
    assert forecast.left(("slow",), 30.0) == 10.0, "this machine is half as fast"
    # An item that was not there takes as long as the others in the mean.
    forecast = progress.Forecast(Report({"seconds": 20.0}, [quick, slow]), items)
    assert forecast.left((), 3.0) == pytest.approx(30.0)


def test_without_a_report_the_pace_of_the_session_counts() -> None:
    for earlier in (None, Report()):
        forecast = progress.Forecast(earlier, ("a", "b", "c", "d"))
        assert forecast.left((), 5.0) is None
        assert forecast.left(("a",), 5.0) == 15.0
