"""The one door through which a script enters the probe: what goes wrong behind it is written down and never raised.

The first failure silences the probe for the rest of the process. The script goes on, and no check passes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_distcompat.scripts.environment import RUN

_failed = False
#: (place, traceback) -> whether it went to the log of a rank.
_report: Callable[[str, str], bool] | None = None


def report_to(report: Callable[[str, str], bool]) -> None:
    """Have the first failure written to the log of the rank that this process is from now on."""
    global _report  # noqa: PLW0603 - a process has one probe
    _report = report


def failed() -> bool:
    """Return whether the probe has failed in this process."""
    return _failed


def attempt(where: str, function: Callable[..., Any], *args: Any, always: bool = False, **kwargs: Any) -> Any:
    """Call ``function`` and return its result; None if it raises, or if the probe has failed before.

    Args:
        where: The name of the place in the script, for the report.
        function: The part of the probe that is called.
        *args: Its positional arguments.
        always: Call it although the probe has failed before: it says how the rank ended, or undoes what was done.
        **kwargs: Its keyword arguments.

    """
    global _failed  # noqa: PLW0603 - a process has one probe
    if _failed and not always:
        return None
    try:
        return function(*args, **kwargs)
    except Exception:
        _failed = True
        _write_down(where, traceback.format_exc())
        return None


def guarded(where: str, function: Callable[..., Any], *, always: bool = False) -> Callable[..., Any]:
    """Return ``function`` behind the door, for whoever keeps it and calls it later: a hook, a callback."""

    @functools.wraps(function)
    def door(*args: Any, **kwargs: Any) -> Any:
        return attempt(where, function, *args, always=always, **kwargs)

    return door


def _write_down(where: str, text: str) -> None:
    """Write it to the log of the rank, or to a file of its own in a process that is no rank (yet) or has lost its log."""
    with contextlib.suppress(Exception):
        if _report is not None and _report(where, text):
            return
    with contextlib.suppress(Exception):
        file = Path(os.environ[RUN], f"probe-{os.getpid()}.failed")
        file.write_text(f"at {where}:\n{text}", encoding="utf-8")
