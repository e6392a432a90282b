"""pytest plugin with the fixture ``distcompat``, by which a test runs scripts on several ranks.

    def test_sft(distcompat, tmp_path):
        run = distcompat.launch("train.py", "--output_dir", tmp_path, strategy="fsdp2")
        run.check("active", "names")

A *rank* is one of the processes that train together. The fixture has the functions ``launch``,
``resume_roundtrip`` and ``parity`` of ``ext.scripts``, and fills in what the pytest session knows
from its options: the device, the number of ranks, the time limit, and the pool that lends GPUs to
one test at a time.

pytest loads this module by the entry point ``distcompat-scripts``. It imports the rest of
``ext.scripts`` only when a test uses the fixture, so that other sessions start fast.
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
    """The functions of ``ext.scripts`` with this session's devices, time limit and directories.

    Args:
        session: The state of this plugin in the pytest session.
        item: The test that uses the fixture.
    """

    def __init__(self, session: DistcompatSession, item: pytest.Item) -> None:
        self._session = session
        self._item = item

    def _host(self, *world_sizes: Any) -> Any:
        """Return the host for these numbers of ranks; skip the test if there are too few GPUs.

        Args:
            *world_sizes: What the test passed as ``world_size`` and the like; None if it passed
                nothing. A value that is no number is left for ``launch`` to report.
        """
        from pytest_distcompat.ext.scripts.launching import Host

        session = self._session
        sizes = [size for size in world_sizes if isinstance(size, int)]
        problem = session.too_large(max(sizes, default=session.world_size))
        if problem:
            pytest.skip(problem)
        return Host(
            device=session.device,
            world_size=session.world_size,
            pool=session.pool,
            timeout=session.timeout,
            directory=session.store / "scripts",
        )

    def launch(self, script: str | Path, *args: str | Path, **settings: Any) -> ScriptRun:
        """Call ``pytest_distcompat.ext.scripts.launch``.

        What the CPU bridge changed in libraries is noted in the test's report.
        """
        from pytest_distcompat.ext.scripts import launch

        host = self._host(settings.get("world_size"))
        # A failed run is returned first, so that the report has its notes too, and raises below.
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
        """Add the changes of the CPU bridge to the properties of the test, each once.

        pytest sends properties to the process that reports, and to JUnit's file.
        """
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
