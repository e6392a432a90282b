"""Annotations of a workflow on GitHub: errors that it shows beside the files of a pull request.

A step of the workflow calls ``python -m pytest_distcompat.report.github DIRECTORY CODE BELOW``
after pytest has ended. DIRECTORY has the files ``report.json`` and ``junit.xml`` that the session
wrote, CODE is pytest's exit code, and BELOW the directory in which pytest ran, relative to the
repository. GitHub reads annotations from the output, one on each line:
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#setting-an-error-message.
For example::

    ::error file=tests/test_a.py,title=FAIL%3A ddp-fp32-w2 (torch)::3 parameters have other names

There is an annotation for each *cause* in the report (failed verdicts with the same message,
numbers aside), and for each other test that failed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree as ET

from pytest_distcompat.excerpt import visible
from pytest_distcompat.report.causes import Cause, causes, unshown
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.text import HEADLINE, cut

#: The number of errors of a step that GitHub shows.
MOST = 10
#: How many cells of a cause its annotation names.
CELLS = 5
#: pytest's exit codes, as texts, of sessions that came to their end: passed, failed, or no tests
#: (https://docs.pytest.org/en/stable/reference/exit-codes.html).
_WITHOUT_PROBLEM = {"0", "1", "5"}


@dataclass(frozen=True)
class Annotation:
    """An error, at a file if one is known."""

    title: str
    message: str
    #: The path, relative to the directory in which pytest ran; empty for none.
    file: str = ""
    #: The line, from 1; 0 if it is not known.
    line: int = 0

    def command(self, below: str) -> str:
        """Return the line that makes GitHub show the annotation.

        Args:
            below: The directory of the repository to which the file is relative.
        """
        properties: dict[str, str] = {}
        if self.file:
            properties["file"] = str(PurePosixPath(below) / self.file)
        if self.line:
            properties["line"] = str(self.line)
        if self.title:
            properties["title"] = self.title
        texts = []
        for name, value in properties.items():
            texts.append(f"{name}={_escaped_property(value)}")
        return f"::error {','.join(texts)}::{_escaped(self.message)}"


def read_annotations(directory: Path, code: str) -> list[Annotation]:
    """Return the annotations for the files that a session wrote into the directory.

    Either file may be missing, if the session ended too early.

    Args:
        directory: The directory with ``report.json`` and ``junit.xml``.
        code: pytest's exit code, as ``1``.
    """
    report_file = directory / "report.json"
    junit_file = directory / "junit.xml"
    report = Report.read(report_file) if report_file.exists() else Report()
    annotations = list(_of_report(report))
    if junit_file.exists():
        annotations += _of_other_tests(junit_file, report)
    if not annotations and code not in _WITHOUT_PROBLEM:
        message = f"pytest ended with exit code {code} before it had a result: see its output"
        annotations.append(Annotation("pytest", message))
    return annotations


def _of_report(report: Report) -> Iterator[Annotation]:
    """Yield an annotation for each cause, at the file of its first verdict."""
    for cause in causes(report.results):
        first_cell, *_ = cause.cells
        title = visible(f"{cause.words}: {first_cell}")
        lines = [visible(line) for line in _cause_lines(cause)]
        first_result = cause.results[0]
        file, _, _ = first_result.nodeid.partition("::")
        yield Annotation(title, "\n".join(lines), file)


def _cause_lines(cause: Cause) -> Iterator[str]:
    """Yield the headline of a cause, some of its cells, and the command that reproduces it."""
    yield cut(cause.headline, HEADLINE)
    checks_by_cell = cause.cells
    for cell in list(checks_by_cell)[:CELLS]:
        yield f"{cell}: {', '.join(checks_by_cell[cell])}"
    hidden = len(checks_by_cell) - CELLS
    if hidden > 0:
        yield f"and {hidden} more cells"
    if cause.reproduce:
        yield f"reproduce: {cause.reproduce}"


def _of_other_tests(junit: Path, report: Report) -> Iterator[Annotation]:
    """Yield an annotation for each failed test that is no verdict of the report."""
    # Class and function of each verdict: ("TestA", "test[ddp-fp32-w2:names]"). A test case in
    # junit.xml has classname="tests.test_a.TestA" and the same name.
    verdict_items: set[tuple[str, ...]] = set()
    for result in report.results:
        names = result.nodeid.split("::")
        verdict_items.add(tuple(names[-2:]))
    for case in ET.parse(junit).iter("testcase"):  # noqa: S314 - pytest wrote it
        name = case.get("name", "")
        _, _, group = case.get("classname", "").rpartition(".")
        failure = _failure(case)
        if failure is None or (group, name) in verdict_items:
            continue
        message = visible(failure.get("message", ""))
        # Lines are counted from 0 there.
        line = int(case.get("line", "-1")) + 1
        yield Annotation(visible(name), message, case.get("file", ""), line)


def _failure(case: ET.Element) -> ET.Element | None:
    """Return the element that says how a test failed; None for a test that did not."""
    for element in case:
        if element.tag in {"failure", "error"}:
            return element
    return None


def _escaped(text: str) -> str:
    """Return a message as workflow commands need it: on one line."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped_property(text: str) -> str:
    """Return a property as workflow commands need it: a comma or colon would end it."""
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def main(arguments: Sequence[str]) -> None:
    """Print the annotations, as many as GitHub shows; the last then says how many there are more.

    Args:
        arguments: DIRECTORY, CODE and BELOW, as the module's docstring explains them.
    """
    directory, code, below = arguments
    annotations = read_annotations(Path(directory), code)
    if len(annotations) > MOST:
        hidden = len(annotations) - MOST + 1
        rest = Annotation("pytest-distcompat", f"{unshown(hidden)}: see the report")
        annotations = [*annotations[: MOST - 1], rest]
    for annotation in annotations:
        sys.stdout.write(f"{annotation.command(below)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
