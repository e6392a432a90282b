"""Warning that coverage is measured in pytest's process, but not on ranks.

*Ranks* are the processes on which distributed tests run. pytest-cov and ``coverage run`` measure
pytest's process. They measure ranks too only with the setting ``[run] patch``. After collection the
plugin calls ``warn`` in each process that will run distributed tests.
"""

from __future__ import annotations

import sys
from typing import Any

from pytest_distcompat.plugin.session import DistcompatSession

#: What coverage has to patch. Ranks are forked from a fork server, which is a subprocess, and end
#: by ``os._exit``. coverage can patch both from 7.10 on
#: (https://coverage.readthedocs.io/en/latest/config.html#run-patch).
_PATCHES = ("subprocess", "_exit")


def warn(session: DistcompatSession) -> None:
    """Emit the warning if coverage is measured without ranks; of xdist's workers the first does."""
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
    """Return the setting ``patch`` of the coverage that measures this process.

    None if nothing measures it.
    """
    # Not imported here: whoever measures has imported it.
    coverage: Any = sys.modules.get("coverage")
    measuring = coverage.Coverage.current() if coverage is not None else None
    if measuring is None:
        return None
    try:
        return set(measuring.get_option("run:patch") or ())
    except coverage.CoverageException:
        # An older release has no such option.
        return set()
