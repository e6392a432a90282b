"""Representation of a failure in its report.

It is a text of this plugin, in the types that pytest uses for exceptions.
"""

from __future__ import annotations

import pytest
from _pytest._code.code import ReprExceptionInfo, ReprFileLocation, ReprTracebackNative


def represent(
    report: pytest.TestReport,
    text: str,
    location: tuple[str, int, str] | None = None,
    *,
    short: str = "",
) -> None:
    """Have a failing report show a text.

    Not as a plain string: pytest repeats the whole of that in its summary (where the variable
    ``CI`` is set, and with ``-vv``) and in JUnit's ``message``, and annotations of a pull request
    have no line.

    ``_pytest._code`` is private. ``pytest.ExceptionInfo.getrepr`` returns its types, but only for
    real exceptions; xdist can serialize them. ``tests/plugin/test_private_names.py`` fails when
    they change.

    Args:
        report: The report, which is changed in place.
        text: The whole text.
        location: The file and line (from 1) of the failure; by default those of the test.
        short: The line for summaries, JUnit's ``message`` and annotations; by default the first
            line of the text.
    """
    path, line_before, _ = report.location
    line = (line_before or 0) + 1
    if location is not None:
        path, line, _ = location
    short = short or text.strip().partition("\n")[0]
    traceback = ReprTracebackNative([f"{text.rstrip()}\n"])
    report.longrepr = ReprExceptionInfo(
        reprtraceback=traceback, reprcrash=ReprFileLocation(path, line, short)
    )
