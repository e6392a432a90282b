"""Guard around every call from a script into the probe.

The probe's first exception is reported and silences it; the script goes on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_distcompat.ext.scripts.environment import RUN

_failed = False
#: (description of the call, traceback) -> whether it was written to the log of a rank.
_report: Callable[[str, str], bool] | None = None


def report_to(report: Callable[[str, str], bool]) -> None:
    """Set the function that writes the probe's first failure to the log of this rank."""
    global _report  # noqa: PLW0603 - a process has one probe
    _report = report


def failed() -> bool:
    """Tell whether the probe has failed in this process."""
    return _failed


def attempt(
    where: str, function: Callable[..., Any], *args: Any, always: bool = False, **kwargs: Any
) -> Any:
    """Call ``function`` and return its result; None if it raises, or the probe has failed before.

    ``where`` names the call of the script. With ``always`` a probe that failed before is called
    too, to report how the rank ended or to undo a change.
    """
    global _failed  # noqa: PLW0603 - a process has one probe
    if _failed and not always:
        return None
    try:
        return function(*args, **kwargs)
    except Exception:
        _failed = True
        _report_failure(where, traceback.format_exc())
        return None


def guarded(
    where: str, function: Callable[..., Any], *, always: bool = False
) -> Callable[..., Any]:
    """Return ``function`` wrapped in ``attempt``.

    It is for a caller that stores it: a hook, a callback.
    """

    @functools.wraps(function)
    def guarded_call(*args: Any, **kwargs: Any) -> Any:
        return attempt(where, function, *args, always=always, **kwargs)

    return guarded_call


def _report_failure(where: str, text: str) -> None:
    """Write a failure to the log of the rank.

    It goes to a separate file if there is no such log, or the log cannot be written.
    """
    with contextlib.suppress(Exception):
        if _report is not None and _report(where, text):
            return
    with contextlib.suppress(Exception):
        file = Path(os.environ[RUN], f"probe-{os.getpid()}.failed")
        file.write_text(f"at {where}:\n{text}", encoding="utf-8")
