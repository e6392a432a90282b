"""The fixture ``distcompat``.

With it an ordinary test runs scripts and command lines on ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.failures import hides_frames
from pytest_distcompat.plugin.current import session_of
from pytest_distcompat.plugin.on_ranks.launched import STARTS_RANKS

if TYPE_CHECKING:
    from pytest_distcompat.ext.scripts import Parity, RoundTrip, ScriptRun
    from pytest_distcompat.plugin.session import DistcompatSession


#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames


class Distcompat:
    """``pytest_distcompat.ext.scripts`` with this session's devices, time limit and directories."""

    def __init__(self, session: DistcompatSession, item: pytest.Item) -> None:
        self._session = session
        self._item = item

    def _host(self, *world_sizes: Any) -> Any:
        """Return the host for the largest of these world sizes, or skip if it is too large here.

        A value that is no number is left for ``launch`` to report.
        """
        from pytest_distcompat.ext.scripts.launching import Host

        session = self._session
        sizes = [size for size in world_sizes if isinstance(size, int)]
        problem = session.too_large(max(sizes, default=session.world_size))
        if problem:
            pytest.skip(problem)
        return Host(
            session.device,
            session.world_size,
            session.pool,
            session.timeout,
            session.store / "scripts",
        )

    def launch(self, script: str | Path, *args: str | Path, **settings: Any) -> ScriptRun:
        """Call ``pytest_distcompat.ext.scripts.launch``.

        What was bridged on the CPU is noted in the test's report.
        """
        from pytest_distcompat.ext.scripts import launch

        host = self._host(settings.get("world_size"))
        run = launch(script, *args, **{"host": host, **settings, "allow_failure": True})
        self._add_labels(run)
        if not settings.get("allow_failure") and not settings.get("fails"):
            run.raise_if_failed()
        return run

    def resume_roundtrip(
        self, script: str | Path, args: Sequence[str], **settings: Any
    ) -> RoundTrip:
        """Call ``pytest_distcompat.ext.scripts.resume_roundtrip``."""
        from pytest_distcompat.ext.scripts import resume_roundtrip

        host = self._host(settings.get("world_size"), settings.get("reshard_to"))
        trip = resume_roundtrip(script, args, **{"host": host, **settings})
        self._add_labels(trip.resumed)
        return trip

    def parity(self, script: str | Path, **settings: Any) -> Parity:
        """Call ``pytest_distcompat.ext.scripts.parity``."""
        from pytest_distcompat.ext.scripts import parity

        host = self._host(settings.get("world_size"))
        compared = parity(script, **{"host": host, **settings})
        self._add_labels(compared.many)
        return compared

    def _add_labels(self, run: ScriptRun) -> None:
        for label in run.labels:
            if ("distcompat_bridge", label) not in self._item.user_properties:
                self._item.user_properties.append(("distcompat_bridge", label))


@pytest.fixture
def distcompat(request: pytest.FixtureRequest) -> Distcompat:
    """Run unmodified scripts and command lines on ranks.

    For example ``distcompat.launch("train.py", strategy="fsdp2")``.
    """
    request.node.stash[STARTS_RANKS] = True
    return Distcompat(session_of(request.config), request.node)
