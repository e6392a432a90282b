"""Rank logs, written and read back."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path

import pytest

from pytest_distcompat.events import Action, Done, Error, Event, Note, SnapshotTaken, Start, has_ended
from pytest_distcompat.launch.rank_log import LogReader, RankLog, read_events
from pytest_distcompat.launch.request import Request, interpreter


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("-m pytest -W error", ""),
        ("/bin/pytest -O", ""),
        ("-W error -X dev -m pytest", "-W error -X dev"),
        ("-Werror -Xdev -OO -m pytest", "-W error -X dev -O -O"),
        ("-BsWerror::ResourceWarning -c pass -O", "-B -s -W error::ResourceWarning"),
        ("-Bm pytest -O", "-B"),
        ("-iO script.py", "-O"),
        ("-", ""),
        ("", ""),
    ],
)
def test_the_flags_that_the_interpreter_was_given(monkeypatch: pytest.MonkeyPatch, line: str, flags: str) -> None:
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *line.split()])
    assert interpreter() == [sys.executable, *flags.split()]


def write(directory: Path, rank: int, *events: Event) -> Path:
    """Log these events, and return the file."""
    with contextlib.closing(RankLog(directory, rank)) as rank_log:
        for event in events:
            rank_log.write(event)
    return rank_log.path


def test_events_come_back_as_they_were_written(tmp_path: Path) -> None:
    # A text in it that looks like another event's beginning.
    snapshot = SnapshotTaken("step", 1, {"text": '{"event": "error"'})
    events = (Start(7, oom_kills=2), snapshot, Note("seen", {"names": ["a"]}), Error("ValueError", "x", "odd \udcff"))
    write(tmp_path, 1, *events)
    events_read = read_events(tmp_path, 1)
    assert [dataclasses.replace(event, rank=-1, time=0.0, memory=0) for event in events_read] == list(events)
    assert {event.rank for event in events_read} == {1}
    for event in events_read:
        assert event.memory
        assert event.time
    assert read_events(tmp_path, 0) == []


def test_a_reader_returns_new_events(tmp_path: Path) -> None:
    logs = LogReader(tmp_path, [0, 1])
    assert logs.read() == {0: [], 1: []}
    path = write(tmp_path, 0, Start(7))
    assert [event.name for event in logs.read()[0]] == ["start"]
    with path.open("ab") as file:
        file.write(b'{"event": "action", "action": "st')
    assert [event.name for event in logs.read()[0]] == ["start"]
    with path.open("ab") as file:
        file.write(b'ep", "index": 3}\n')
    write(tmp_path, 1, Start(8))
    first, second = logs.read().values()
    assert first[1] == Action("step", 3)
    assert [event.name for event in second] == ["start"]


def test_a_log_that_another_process_begins_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    """A script may have several processes, each of which is the same rank after the one before."""
    logs = LogReader(tmp_path, [0])
    path = write(tmp_path, 0, Start(7), Done())
    assert len(logs.read()[0]) == 2
    path.rename(tmp_path / "before.jsonl")
    write(tmp_path, 0, Start(8), Action("step", 1), Done())
    (start, *rest) = logs.read()[0]
    assert isinstance(start, Start)
    assert start.pid == 8
    assert len(rest) == 2


def test_the_unfinished_line_of_a_dying_rank_is_dropped(tmp_path: Path) -> None:
    with write(tmp_path, 0, Start(7)).open("ab") as file:
        file.write(b'{"event": "done", "time": 3.0, "text": "\xc3')
    assert [event.name for event in read_events(tmp_path, 0)] == ["start"]


def test_the_last_event_of_a_child_is_not_that_of_its_rank(tmp_path: Path) -> None:
    write(tmp_path, 0, Start(7), Done(8))
    assert not has_ended(read_events(tmp_path, 0))
    write(tmp_path, 0, Done(7))
    assert has_ended(read_events(tmp_path, 0))


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    with write(tmp_path, 0, Start(7)).open("a", encoding="utf-8") as file:
        file.write('{}\n[1]\n"text"\nnull\n3\n{"event": 3}\n{"rank": 0}\n\nno JSON\n{"event": "error"}\n')
    write(tmp_path, 0, Done())
    assert [event.name for event in read_events(tmp_path, 0)] == ["start", "done"]


def test_what_a_request_has_from_its_process_stays_on_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node agent the ranks had the agent's command line, and did not find the modules of pytest's rootdir."""
    sent = Request("", {}, 2, "/nowhere").from_here()
    monkeypatch.setattr(sys, "argv", ["the agent"])
    monkeypatch.setattr(sys, "path", ["/agents/own"])
    assert sent.from_here() == sent
    assert "the agent" not in sent.argv
