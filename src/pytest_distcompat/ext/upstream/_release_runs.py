"""A pytest session with one release of a package, and the table that compares several.

``distcompat releases`` (``releases.py``) calls ``run_with`` for each release. It starts pytest in a
process of its own, with the environment that ``side_by_side.environment`` has made: Python then
imports that release. pytest writes a JSON report and a log; what came of it is a ``Run``. At the
end ``table(runs)`` makes a Markdown table::

    | | accelerate==1.12.0 | installed |
    | --- | --- | --- |
    | red | 3 | 0 |
    | load_state raised KeyError: ... [fsdp2-fp32-w2: resume] | 3 |  |

*Red* verdicts are those that make a session fail. A *cause* has all failed
verdicts with the same message, numbers aside.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat.ext.upstream.side_by_side import file_name
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report.causes import Cause, causes
from pytest_distcompat.report.document import Report, counts
from pytest_distcompat.report.markdown import escape
from pytest_distcompat.report.text import counts_text, cut

#: The longest headline of a cause in the table, in characters.
MAX_HEADLINE = 160


@dataclass(frozen=True)
class Run:
    """Session with one release.

    Attributes:
        release: The release: ``accelerate==1.12.0``, a commit, or ``installed``.
        report: The report that pytest wrote; None if it wrote none.
        problem: What else went wrong, as a sentence; empty if nothing did.
        code: pytest's exit code; None if it was not started.
    """

    release: str
    report: Report | None
    problem: str = ""
    code: int | None = None

    @property
    def good(self) -> bool:
        """Tell whether there is a report without red verdicts."""
        if self.problem or self.report is None:
            return False
        return not counts(self.report)["red"]

    @property
    def red(self) -> bool | None:
        """Tell whether tests failed; None if that cannot be told, as where no cell could run."""
        # Other exit codes: pytest was interrupted, misused, or collected nothing.
        if self.report is None or self.code not in {0, 1}:
            return None
        # All cells were skipped, as with a release that is too old for them.
        if self.report.results and not counts(self.report)["ran"]:
            return None
        return self.code == 1

    @property
    def causes(self) -> dict[tuple[str, str], Cause]:
        """Return the causes of failure, each with the verdicts that it explains.

        The key is (node id of the suite, message without its numbers), which equals that of the
        same cause with another release.
        """
        if self.report is None:
            return {}
        return {cause.key: cause for cause in causes(self.report.results)}

    @property
    def summary(self) -> str:
        """Return the outcome in one line."""
        parts = []
        if self.report is not None:
            parts.append(counts_text(self.report))
        parts.append(self.problem)
        return "; ".join(filter(None, parts))


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the lines of a Markdown table: counts of each release, then causes of failure.

    Of each cause it has the number of its verdicts.
    """
    releases = " | ".join([run.release for run in runs])
    yield f"| | {releases} |"
    yield "|" + " --- |" * (len(runs) + 1)
    yield from _count_rows(runs)
    yield from _cause_rows(runs)
    for run in runs:
        if run.problem:
            yield f"\n{run.release}: {run.problem}"


def _count_rows(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a row for each count of verdicts."""
    columns = [_counts(run) for run in runs]
    for name in ("selected", "ran", "passed", "known", "refused", "red"):
        figures = [str(column.get(name, "-")) for column in columns]
        yield f"| {name} | {' | '.join(figures)} |"


def _counts(run: Run) -> dict[str, int]:
    """Return the counts of a run's verdicts by name; empty without a report."""
    if run.report is None:
        return {}
    return counts(run.report)


def _verdict_count(cause: Cause | None) -> str:
    """Return how many verdicts a cause has with a release; empty if it does not appear there."""
    if cause is None:
        return ""
    return str(len(cause.results))


def _cause_rows(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a row for each cause of failure: how many verdicts it has with each release."""
    columns = [run.causes for run in runs]
    # All causes, each once, in the order of their first release. Of the same cause with several
    # releases the last one gives the example.
    causes_by_key: dict[tuple[str, str], Cause] = {}
    for column in columns:
        causes_by_key |= column
    for key, cause in causes_by_key.items():
        figures = [_verdict_count(column.get(key)) for column in columns]
        headline = cut(cause.headline, MAX_HEADLINE)
        cell, checks = next(iter(cause.cells.items()))
        example = f"{escape(cell)}: {escape(checks[0])}"
        label = f"{escape(headline)} [{example}]"
        yield f"| {label} | {' | '.join(figures)} |"


def run_with(
    release: str, variables: Mapping[str, str], directory: Path, arguments: Sequence[str]
) -> Run:
    """Run pytest with a release, in an environment that has it; return what came of it.

    Args:
        release: The release, which names the files of the run.
        variables: The whole environment of pytest.
        directory: Where the report and the log are written.
        arguments: The arguments of pytest.
    """
    report_file = directory / f"{file_name(release)}.json"
    log = directory / f"{file_name(release)}.log"
    # A report of an earlier session must not be taken for this one's.
    report_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *arguments, f"--distcompat-report={report_file}"]
    # A session takes minutes and prints nothing here.
    print(f"{release}: pytest writes to {log}", file=sys.stderr, flush=True)
    with (
        log.open("wb") as out,
        subprocess.Popen(command, env=variables, stdout=out, stderr=subprocess.STDOUT) as pytest,
    ):
        try:
            code = pytest.wait()
        except KeyboardInterrupt:
            # pytest received Ctrl-C too, and ends its ranks.
            pytest.wait()
            raise
    try:
        report = Report.read(report_file)
    except UsageProblem:
        return Run(release, None, f"no report, pytest ended with {code}: {log}", code)
    # Exit code 1 is explained by red verdicts. Without any, another test failed, or a file could
    # not be imported.
    red = counts(report)["red"]
    problem = ""
    if code != 0 and not (code == 1 and red):
        problem = f"pytest ended with {code}: {log}"
    return Run(release, report, problem, code)
