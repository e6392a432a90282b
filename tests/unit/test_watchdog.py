"""What a watchdog counts as the time of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_distcompat import clock
from pytest_distcompat.launch.forensics.watchdog import Watchdog
from pytest_distcompat.launch.request import Request


def test_the_time_limit_waits_while_the_job_is_suspended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock, "now", lambda: now)
    watchdog = Watchdog(Request("a:b", {}, 1, str(tmp_path), timeout=10))
    acted = []
    # 4 s, the gap, and 7 s more.
    for passed in (1, 1, 1, 1, 3600, 1, 1, 1, 1, 1, 1, 1):
        now += passed
        watchdog.check()
        acted.append(watchdog.acted)
    assert acted == [False] * 11 + [True]
    assert watchdog.timed_out
