"""The fixture ``distcompat``: scripts and command lines, run on ranks from an ordinary test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.plugin.current import session_of

if TYPE_CHECKING:
    from pytest_distcompat.plugin.session import DistcompatSession
    from pytest_distcompat.scripts import RoundTrip, ScriptRun


class Distcompat:
    """``pytest_distcompat.scripts`` with this session's devices, time limit and directories."""

    def __init__(self, session: DistcompatSession, item: pytest.Item) -> None:
        self._session = session
        self._item = item

    def _host(self, *asked: Any) -> Any:
        """For ranks as many as the largest of what is asked for; what is no number of ranks ``launch`` will say."""
        from pytest_distcompat.scripts.launching import Host

        session = self._session
        sizes = [size for size in asked if isinstance(size, int)]
        problem = session.too_large(max(sizes, default=session.world_size))
        if problem:
            pytest.skip(problem)
        return Host(session.device, session.world_size, session.pool, session.timeout, session.store / "scripts")

    def launch(self, script: str | Path, *args: str | Path, **settings: Any) -> ScriptRun:
        """``pytest_distcompat.scripts.launch``; what was bridged on the CPU stands in the test's report."""
        from pytest_distcompat.scripts import launch

        host = self._host(settings.get("world_size"))
        run = launch(script, *args, **{"host": host, **settings, "allow_failure": True})
        self._label(run)
        if not settings.get("allow_failure") and not settings.get("fails"):
            run.raise_if_failed()
        return run

    def resume_roundtrip(self, script: str | Path, args: Sequence[str], **settings: Any) -> RoundTrip:
        """``pytest_distcompat.scripts.resume_roundtrip``."""
        from pytest_distcompat.scripts import resume_roundtrip

        host = self._host(settings.get("world_size"), settings.get("reshard_to"))
        trip = resume_roundtrip(script, args, **{"host": host, **settings})
        self._label(trip.resumed)
        return trip

    def _label(self, run: ScriptRun) -> None:
        for label in run.labels:
            if ("distcompat_bridge", label) not in self._item.user_properties:
                self._item.user_properties.append(("distcompat_bridge", label))


def finish_report(report: pytest.TestReport, error: BaseException) -> None:
    """No xfail mark excuses more than an exception."""
    from pytest_distcompat.plugin.declared import is_hard
    from pytest_distcompat.plugin.marked.outcome import unexcused

    if hasattr(report, "wasxfail") and is_hard(error):
        unexcused(report)


@pytest.fixture
def distcompat(request: pytest.FixtureRequest) -> Distcompat:
    """Runs unmodified scripts and command lines on ranks: ``distcompat.launch("train.py", strategy="fsdp2")``."""
    return Distcompat(session_of(request.config), request.node)
