"""Warning that coverage is measured in this process, but not on ranks.

Both pytest-cov and ``coverage run`` measure this process.
"""

from __future__ import annotations

import sys
from typing import Any

from pytest_distcompat.plugin.session import DistcompatSession

#: What coverage has to patch: fork servers are subprocesses, and ranks end by ``os._exit``. It can
#: from 7.10 on (https://coverage.readthedocs.io/en/latest/config.html#run-patch).
_PATCHES = ("subprocess", "_exit")


def warn(session: DistcompatSession) -> None:
    """Emit the warning, once for all xdist workers."""
    patched = patched_by_coverage()
    if patched is None or session.worker not in {"", "gw0"}:
        return
    if not {*_PATCHES} <= patched:
        session.notice(
            "the coverage of ranks is not measured: it needs coverage 7.10 or newer, "
            "and in its settings "
            f"[run] patch = {', '.join(_PATCHES)}"
        )


def patched_by_coverage() -> set[str] | None:
    """Return what the coverage that measures this process patches; None if none does."""
    # Imported by whoever measures.
    coverage: Any = sys.modules.get("coverage")
    measuring = coverage.Coverage.current() if coverage is not None else None
    if measuring is None:
        return None
    try:
        return set(measuring.get_option("run:patch") or ())
    except coverage.CoverageException:
        # An older release has no such option.
        return set()
