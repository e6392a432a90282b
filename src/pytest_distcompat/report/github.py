"""Annotations of a run on GitHub: an error for each cause in a report, and for each other test that failed.

``python -m pytest_distcompat.report.github DIRECTORY CODE BELOW`` prints them for the reports in a directory, pytest's exit
code, and the directory in which pytest ran:
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#setting-an-error-message.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree as ET

from pytest_distcompat.excerpt import visible
from pytest_distcompat.report.causes import causes, unshown
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.text import HEADLINE, cut

#: GitHub shows so many errors of a step.
MOST = 10
#: How many cells of a cause its annotation names.
CELLS = 5
#: pytest's exit codes of sessions that ran tests (https://docs.pytest.org/en/stable/reference/exit-codes.html).
_RAN = {"0", "1"}


@dataclass(frozen=True)
class Annotation:
    """An error at a file and, if it is known, a line."""

    title: str
    message: str
    file: str = ""
    line: int = 0

    def command(self, below: str) -> str:
        """Return the workflow command; the file is relative to ``below``, a directory of the repository."""
        file = str(PurePosixPath(below) / self.file) if self.file else ""
        fields = {"file": file, "line": str(self.line or ""), "title": self.title}
        named = ",".join(f"{name}={_of_field(value)}" for name, value in fields.items() if value)
        return f"::error {named}::{_escaped(self.message)}"


def read_annotations(directory: Path, code: str) -> list[Annotation]:
    """Return the annotations for the files that a session wrote into the directory."""
    file, junit = directory / "report.json", directory / "junit.xml"
    report = Report.read(file) if file.exists() else Report()
    found = [*_of_report(report)]
    found += _of_other_tests(junit, report) if junit.exists() else ()
    if not found and code not in {*_RAN, "5"}:
        found.append(Annotation("pytest", f"pytest ended with exit code {code} before it had a result: see its output"))
    return found


def _of_report(report: Report) -> Iterator[Annotation]:
    for cause in causes(report.results):
        cells = [f"{cell}: {', '.join(checks)}" for cell, checks in cause.cells.items()]
        lines = [cut(cause.headline, HEADLINE), *cells[:CELLS]]
        if len(cells) > CELLS:
            lines.append(f"and {len(cells) - CELLS} more cells")
        if cause.reproduce:
            lines.append(f"reproduce: {cause.reproduce}")
        title = visible(f"{cause.words}: {next(iter(cause.cells))}")
        yield Annotation(title, "\n".join(map(visible, lines)), cause.results[0].nodeid.partition("::")[0])


def _of_other_tests(junit: Path, report: Report) -> Iterator[Annotation]:
    """Yield the failed tests that are no verdict of the report."""
    of_suites = {tuple(result.nodeid.split("::")[-2:]) for result in report.results}
    for case in ET.parse(junit).iter("testcase"):  # noqa: S314 - pytest wrote it
        name, group = case.get("name", ""), case.get("classname", "").rpartition(".")[2]
        failed = next((one for one in case if one.tag in {"failure", "error"}), None)
        if failed is not None and (group, name) not in of_suites:
            # Lines are counted from 0 there.
            line = int(case.get("line", "-1")) + 1
            yield Annotation(visible(name), visible(failed.get("message", "")), case.get("file", ""), line)


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _of_field(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def main(arguments: Sequence[str]) -> None:
    """Print the annotations, as many as GitHub shows."""
    directory, code, below = arguments
    found = read_annotations(Path(directory), code)
    if len(found) > MOST:
        rest = Annotation("pytest-distcompat", f"{unshown(len(found) - MOST + 1)}: see the report")
        found = [*found[: MOST - 1], rest]
    sys.stdout.writelines(f"{one.command(below)}\n" for one in found)


if __name__ == "__main__":
    main(sys.argv[1:])
