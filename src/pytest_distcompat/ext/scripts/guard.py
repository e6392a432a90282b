"""Guard around every call from a script into the probe: an error of the probe stays the probe's.

The *probe* is the code that records an unmodified script's training from inside its processes. The
script must not notice it. So each hook, wrapper and callback of the probe runs as
``attempt("Accelerator.save_state", function, ...)``. The first exception is written to the log of
the rank, and silences the probe: later calls do nothing, and the script goes on. The process that
launched the script reads the log, and lets every check of the run fail ("the probe itself failed").
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

#: Whether the probe has failed in this process.
_failed = False
#: (description of the call, traceback) -> whether it was written to the log of a rank. None until
#: the process has become a rank.
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

    Args:
        where: The call of the script, for the report: ``Accelerator.save_state``.
        function: The function of the probe.
        *args: Its arguments.
        always: Whether it is called also after the probe has failed, to report how the rank ended
            or to undo a change.
        **kwargs: Its keyword arguments.
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
    """Return ``function`` wrapped in ``attempt``, for torch or Python to call as a hook."""

    @functools.wraps(function)
    def guarded_call(*args: Any, **kwargs: Any) -> Any:
        return attempt(where, function, *args, always=always, **kwargs)

    return guarded_call


def _report_failure(where: str, text: str) -> None:
    """Write a failure to the log of the rank, else to a file ``probe-PID.failed`` of its own.

    A process that is no rank has no log, and the log may be what failed. If the file cannot be
    written either, the failure is lost: the script must go on.
    """
    with contextlib.suppress(Exception):
        if _report is not None and _report(where, text):
            return
    with contextlib.suppress(Exception):
        file = Path(os.environ[RUN], f"probe-{os.getpid()}.failed")
        file.write_text(f"at {where}:\n{text}", encoding="utf-8")
