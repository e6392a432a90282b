"""``releases``: the same tests with several releases of a package, and what each of them changes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat.cli.side_by_side import environment, file_name, install, requirements
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report import Cause, Report, causes, counts, counts_text, replace_file
from pytest_distcompat.report.markdown import escape
from pytest_distcompat.report.text import cut

#: What is compared with the others last: nothing but what is installed.
INSTALLED = "installed"
#: How much of a cause stands in the table.
CUT = 160


@dataclass(frozen=True)
class Run:
    """The tests with one release: its report if there is one, and what else went wrong."""

    release: str
    report: Report | None
    problem: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing is red, and nothing is missing."""
        return not self.problem and self.report is not None and not counts(self.report)["red"]

    @property
    def causes(self) -> dict[str, Cause]:
        """What makes it red, by what it says."""
        return {cause.wording: cause for cause in causes(self.report.results)} if self.report else {}

    @property
    def summary(self) -> str:
        """One line."""
        return "; ".join(filter(None, (counts_text(self.report) if self.report else "", self.problem)))


def add(commands: Any) -> None:
    """Add the subcommand to the parser's."""
    releases = commands.add_parser(
        "releases",
        help="the same tests with other releases of a package, side by side",
        usage="distcompat releases [-h] --release PACKAGE==VERSION[,...] [--into DIRECTORY] [-o FILE.md] -- PYTEST-ARGUMENT ...",
        description=(
            "Run pytest with each release, then with what is installed, and tell what is red with which. "
            "Exit code 0: nothing is red; 1: something is, or a run came to no report."
        ),
    )
    releases.add_argument(
        "--release",
        action="append",
        required=True,
        metavar="PACKAGE==VERSION[,...]",
        help="installed beside what is there (pip install --target); may be given several times, the oldest first",
    )
    releases.add_argument(
        "--into", type=Path, metavar="DIRECTORY", help=f"keep releases, reports and logs there ({_cache()})"
    )
    releases.add_argument("-o", "--output", type=Path, metavar="FILE.md", help="write the table there too")
    releases.add_argument("arguments", nargs=argparse.REMAINDER, metavar="PYTEST-ARGUMENT", help="of each run")
    releases.set_defaults(call=_releases)


def _releases(told: argparse.Namespace) -> int:
    for release in told.release:
        requirements(release)
    directory = (told.into or _cache()).resolve()
    _writable(directory, told.output)
    arguments = told.arguments[1:] if told.arguments[:1] == ["--"] else told.arguments
    # All of them first: one that is not there is told before any run, which takes minutes.
    places = {release: environment(install(release, directory)) for release in dict.fromkeys(told.release)}
    runs = []
    for release, where in {**places, INSTALLED: dict(os.environ)}.items():
        runs.append(_run(release, where, directory, arguments))
        print(f"{release}: {runs[-1].summary}", flush=True)  # noqa: T201 - a command speaks
    page = "\n".join(table(runs)) + "\n"
    print(f"\n{page}", end="")  # noqa: T201 - a command speaks
    if told.output:
        try:
            replace_file(told.output, page)
        except OSError as error:
            raise UsageProblem(f"{told.output}: {error.strerror}") from None
    return int(not all(run.good for run in runs))


def _writable(directory: Path, page: Path | None) -> None:
    """Raise UsageProblem if nothing can be kept in the directory, or the page not be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if page is not None:
            # As it is, if it is there.
            page.open("ab").close()
    except OSError as error:
        raise UsageProblem(f"{error.filename}: {error.strerror}") from None


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Markdown: what became of the verdicts with each release, then each cause with how many verdicts say it."""
    yield f"| | {' | '.join(run.release for run in runs)} |"
    yield "|" + " --- |" * (len(runs) + 1)
    counted = [counts(run.report) if run.report else {} for run in runs]
    for name in ("asked", "ran", "passed", "known", "refused", "red"):
        figures = (str(one.get(name, "-")) for one in counted)
        yield f"| {name} | {' | '.join(figures)} |"
    columns = [run.causes for run in runs]
    found = {wording: cause for column in columns for wording, cause in column.items()}
    for wording, cause in found.items():
        figures = (str(len(column[wording].results)) if wording in column else "" for column in columns)
        first, checks = next(iter(cause.cells.items()))
        told = f"{escape(cut(cause.headline, CUT))} [{escape(first)}: {escape(checks[0])}]"
        yield f"| {told} | {' | '.join(figures)} |"
    yield from (f"\n{run.release}: {run.problem}" for run in runs if run.problem)


def _run(release: str, where: Mapping[str, str], directory: Path, arguments: Sequence[str]) -> Run:
    written, log = (directory / f"{file_name(release)}.{kind}" for kind in ("json", "log"))
    written.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *arguments, f"--distcompat-report={written}"]
    # A run takes minutes, and says nothing here.
    print(f"{release}: pytest writes to {log}", file=sys.stderr, flush=True)  # noqa: T201 - a command speaks
    with log.open("wb") as out, subprocess.Popen(command, env=where, stdout=out, stderr=subprocess.STDOUT) as pytest:
        try:
            code = pytest.wait()
        except KeyboardInterrupt:
            # It heard Ctrl-C too, and ends its ranks.
            pytest.wait()
            raise
    try:
        report = Report.read(written)
    except UsageProblem:
        return Run(release, None, f"no report, pytest ended with {code}: {log}")
    # 1 is that of a red run; that of tests which are no suite's, of a file that cannot be imported or of no test at all is none.
    told = code == 0 or (code == 1 and counts(report)["red"])
    return Run(release, report, "" if told else f"pytest ended with {code}: {log}")


def _cache() -> Path:
    # What is compiled for one Python is not for another.
    python = f"{sys.implementation.name}-{sys.version_info.major}.{sys.version_info.minor}"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distcompat-releases" / python
