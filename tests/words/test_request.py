"""What a rank writes, read back by whoever watches it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pytest_distcompat.launch.request import RankLog, read_events


def test_who_watches_passes_over_what_the_probe_saw(tmp_path: Path) -> None:
    with contextlib.closing(RankLog(tmp_path, 1)) as rank_log:
        rank_log.write("start", pid=7)
        # A text in it that looks like another event's beginning.
        rank_log.write("moment", moment={"text": '{"event": "error"'})
        rank_log.write("moments", note="another event")
        rank_log.error("ValueError", "x", '{"event": "moment"')
    with rank_log.path.open("a", encoding="utf-8") as file:
        file.write('{"event": "done", "ra')
    everything = ["start", "moment", "moments", "error"]
    assert [event["event"] for event in read_events(tmp_path, 1)] == everything
    assert [event["event"] for event in read_events(tmp_path, 1, but="moment")] == ["start", "moments", "error"]
    assert read_events(tmp_path, 0) == []
