"""What a rank writes, read back by whoever watches it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from pytest_distcompat.launch.request import RankLog, has_ended, interpreter, read_events


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


def test_who_watches_passes_over_what_the_probe_saw(tmp_path: Path) -> None:
    with contextlib.closing(RankLog(tmp_path, 1)) as rank_log:
        rank_log.write("start", pid=7)
        # A text in it that looks like another event's beginning.
        rank_log.write("snapshot", snapshot={"text": '{"event": "error"'})
        rank_log.write("snapshots", note="another event")
        rank_log.error("ValueError", "x", '{"event": "snapshot"')
    with rank_log.path.open("a", encoding="utf-8") as file:
        file.write('{"event": "done", "ra')
    everything = ["start", "snapshot", "snapshots", "error"]
    assert [event["event"] for event in read_events(tmp_path, 1)] == everything
    assert [event["event"] for event in read_events(tmp_path, 1, skip="snapshot")] == ["start", "snapshots", "error"]
    assert read_events(tmp_path, 0) == []


def test_the_last_word_of_a_child_is_not_that_of_its_rank(tmp_path: Path) -> None:
    with contextlib.closing(RankLog(tmp_path, 0)) as rank_log:
        rank_log.write("start", pid=7)
        rank_log.write("done", pid=8)
        assert not has_ended(read_events(tmp_path, 0))
        rank_log.write("done", pid=7)
        assert has_ended(read_events(tmp_path, 0))


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    with contextlib.closing(RankLog(tmp_path, 0)) as rank_log:
        rank_log.write("start", pid=7)
        with rank_log.path.open("a", encoding="utf-8") as file:
            file.write('{}\n[1]\n"text"\nnull\n3\n{"event": 3}\n{"rank": 0}\n\nno JSON\n')
        rank_log.write("done")
    assert [event["event"] for event in read_events(tmp_path, 0)] == ["start", "done"]
