"""What a failure's report shows: our text, told as pytest tells an exception, with a place and one line that says it in short."""

from __future__ import annotations

import pytest
from _pytest._code.code import ReprExceptionInfo, ReprFileLocation, ReprTracebackNative


def represent(
    report: pytest.TestReport, text: str, place: tuple[str, int, str] | None = None, *, short: str = ""
) -> None:
    """Have a failing report show ``text``.

    ``place``: the file and line (from 1) where it failed, without it the test's own. ``short``: what stands in summaries,
    JUnit's ``message`` and annotations, without it the text's first line. Of a plain string pytest repeats the whole in its
    summary (where the variable ``CI`` is set, and with ``-vv``) and in JUnit's ``message``, and annotations of a pull request
    have no line.

    ``_pytest._code`` is private, ``pytest.ExceptionInfo.getrepr`` gives its types, of real exceptions only; they travel through
    xdist. ``tests/plugin/test_private_names.py`` says when they change.
    """
    path, line, _ = report.location
    path, line, _ = place or (path, (line or 0) + 1, "")
    short = short or text.strip().partition("\n")[0]
    traceback = ReprTracebackNative([f"{text.rstrip()}\n"])
    report.longrepr = ReprExceptionInfo(reprtraceback=traceback, reprcrash=ReprFileLocation(path, line, short))
