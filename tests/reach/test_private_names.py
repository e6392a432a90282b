"""Names of coverage's that no document promises. When this fails, so does the function that the message names."""

from __future__ import annotations

from pathlib import Path

from coverage.plugin import FileReporter

from pytest_distcompat.ext.reach.analysis import file_reporter


def test_the_reporter_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f(a):\n    if a:\n        a = (1,\n             2)\n    return a\n", encoding="utf-8")
    message = "reach/analysis.py: file_reporter() makes coverage.python.PythonFileReporter, which is another one now"
    reporter = file_reporter(path)
    assert isinstance(reporter, FileReporter), message
    assert {(2, 3), (2, 5)} <= reporter.arcs(), message
    assert reporter.exit_counts()[2] == 2, message
    assert reporter.translate_lines([4]) == {3}, message
    assert reporter.translate_arcs([(4, 5)]) == {(3, 5)}, message
    assert reporter.no_branch_lines() == reporter.excluded_lines() == set(), message
