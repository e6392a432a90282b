"""Representation of a failure in its report: this plugin's text, in pytest's types for exceptions.

A distributed test fails on other processes, its ranks. pytest's own traceback would show frames of
this plugin. So ``marked.outcome`` and ``suite.run`` call ``represent`` from the hook
``pytest_runtest_makereport``, with the text that the ranks left.
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

    ``report.longrepr`` could be a plain string. But pytest repeats the whole of that in its summary
    (where the variable ``CI`` is set, and with ``-vv``) and in JUnit's ``message``, and annotations
    of a pull request have no line.

    ``_pytest._code`` is private. ``pytest.ExceptionInfo.getrepr`` returns its types, but only for
    real exceptions; xdist can serialize them. ``tests/plugin/test_private_names.py`` fails when
    they change.

    Args:
        report: The report, which is changed in place.
        text: The whole text.
        location: The file, the line (from 1) and the message of the failure, of which the message
            is not used; by default the file and line of the test.
        short: The line for summaries, JUnit's ``message`` and annotations; by default the first
            line of the text.
    """
    # pytest counts the lines of tests from 0.
    path, line_before, _ = report.location
    line = (line_before or 0) + 1
    if location is not None:
        path, line, _ = location
    short = short or text.strip().partition("\n")[0]
    traceback = ReprTracebackNative([f"{text.rstrip()}\n"])
    report.longrepr = ReprExceptionInfo(
        reprtraceback=traceback, reprcrash=ReprFileLocation(path, line, short)
    )
