"""``settings``: lists the settings that the profile ``sweep`` tries, and tries pairs of them.

The command line calls ``add(commands)`` to add the subcommand, and ``_settings`` for
``distcompat settings``. A setting is a field of an object that a driver, the class by which a
trainer is tested, configures its libraries with. There are two forms:

- ``distcompat settings --driver torch AdamW.*`` lists settings with their state, their values to
  try and the reason why they are left out, if they are (``rules.py``).
- ``distcompat settings --driver torch --pairs fsdp2 -o FILE`` trains with several settings at once,
  in rows in which every two values meet (``pairs.py``). Of a row that fails it prints the smallest
  part that still fails, and writes all of these into a report. It runs on two CPU ranks, without
  pytest.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat import clock
from pytest_distcompat.cli.output import WRITTEN, columns, fitted, report_file, table, write_reports
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report.document import Report

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.expect import Expectation
    from pytest_distcompat.ext.upstream.sweep.rules import Setting
    from pytest_distcompat.runner import Runner
    from pytest_distcompat.status import Verdict

#: Settings that are tried together: ``("AdamW.amsgrad=true", "AdamW.maximize=true")``.
Row = tuple[str, ...]
#: The states of a setting: tried with values of its type, with values of the rules, left out by the
#: rules, or without values and without a rule, which is to be mended.
STATES = ("swept", "hinted", "excluded", "unknown")
#: How ``textwrap`` wraps lines below the name of a setting. Values are long words, to be copied.
_INDENTED: dict[str, Any] = {
    "initial_indent": "    ",
    "subsequent_indent": "    ",
    "break_on_hyphens": False,
    "break_long_words": False,
}


def add(commands: Any) -> None:
    """Add the subcommand to the parser's."""
    parser = commands.add_parser(
        "settings",
        help="the settings of the installed libraries that the profile sweep tries",
        description="List the settings of the installed libraries, or try pairs of them. "
        "Exit code 1: a field has neither values to try nor a rule, or a pair fails.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="only settings with this part in their name, or as this pattern has it "
        "(ds_config.*offload*); shown in full",
    )
    parser.add_argument(
        "--state",
        choices=STATES,
        help="only settings in this state: with values of their type, of rules, left out, "
        "or neither",
    )
    parser.add_argument(
        "--driver",
        action="append",
        metavar="NAME",
        help="only of this driver (default: all built-in ones)",
    )
    parser.add_argument(
        "--pairs", metavar="STRATEGY", help="try all pairs of values under this strategy"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="pair only what passed alone in this report of the profile sweep",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=report_file,
        default=[],
        action="append",
        metavar="FILE",
        help=f"of the pairs, {WRITTEN}",
    )
    parser.set_defaults(call=_settings, finds_drivers=True)


def _settings(options: argparse.Namespace) -> int:
    """List settings or try pairs of them, as the options say, and return the exit code."""
    from pytest_distcompat.drivers import DRIVERS

    names = options.driver or DRIVERS.names()
    if not options.pairs:
        if options.output:
            raise UsageProblem("--output is for --pairs")
        chosen = {name: _chosen(name, options) for name in names}
        if options.names and not any(chosen.values()):
            drivers = ", ".join(names)
            patterns = " or ".join(options.names)
            raise UsageProblem(f"no setting of {drivers} is named {patterns}")
        codes = [_list(driver, settings, options) for driver, settings in chosen.items()]
        return max(codes)
    began = clock.wall()
    verdicts: list[Verdict] = []
    for name in names:
        verdicts += _pairs(name, options)
    write_reports(options.output, _report(verdicts, began))
    return int(any(verdict.red for verdict in verdicts))


def _report(verdicts: list[Verdict], began: float) -> Report:
    """Return the report of the smallest sets of settings that fail.

    Args:
        verdicts: A verdict for each set.
        began: When the command began, in seconds since the epoch.
    """
    from pytest_distcompat.installed import versions

    session = {
        "versions": versions(),
        "device": "cpu",
        "world_size": 2,
        "began": clock.utc(began),
        "seconds": round(clock.wall() - began, 1),
        "runs": 0,
        "ending": "finished",
        "settings": {},
        "timeline": [],
    }
    return Report(session, verdicts)


def _chosen(driver: str, options: argparse.Namespace) -> list[Setting]:
    """Return the settings of a driver that the command is about: those that its options choose."""
    from pytest_distcompat.drivers import find_driver
    from pytest_distcompat.ext.upstream.sweep.rules import settings_of, sources_of

    patterns = [_pattern(name) for name in options.names]

    def is_chosen(setting: Setting) -> bool:
        if options.state not in {None, setting.state}:
            return False
        name = setting.name.lower()
        return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    settings = settings_of(sources_of(find_driver(driver)))
    return [setting for setting in settings if is_chosen(setting)]


def _pattern(name: str) -> str:
    """Return the lower-case pattern of a name that the user gave.

    A name without the signs of a pattern may be any part of a setting's name: ``offload`` becomes
    ``*offload*``.
    """
    if any(sign in name for sign in "*?["):
        return name.lower()
    return f"*{name.lower()}*"


def _texts(setting: Setting) -> list[str]:
    """Return the values of a setting and its reason, without those that are empty."""
    values = " ".join([*setting.values, *setting.twice])
    return [text for text in (values, setting.reason) if text]


def _list(driver: str, settings: list[Setting], options: argparse.Namespace) -> int:
    """Print the settings of a driver, in full if the user named some, and return the exit code.

    It is 1 if a setting has neither values nor a rule.
    """
    width = columns()
    if options.names:
        for setting in settings:
            print(f"{setting.name}: {setting.state}")
            for text in _texts(setting):
                # Without a width, all on one line.
                lines = textwrap.wrap(text, width or len(text) + 4, **_INDENTED)
                print(*lines, sep="\n")
    else:
        rows = []
        for setting in settings:
            # Some values are long, so that what follows them is no column of its own.
            values_and_reason = "; ".join(_texts(setting))
            rows.append((setting.name, setting.state, values_and_reason))
        for line in table(("setting", "state", "values; reason"), rows):
            print(fitted(line, width))
    count_by_state = Counter(setting.state for setting in settings)
    counts = [f"{count_by_state[state]} {state}" for state in STATES]
    counted = ", ".join(counts)
    cell_count = 0
    for setting in settings:
        cell_count += len(setting.cells) * len(setting.strategies)
    print(f"{driver}: {len(settings)} settings, {counted}; {cell_count} cells")
    return int(count_by_state["unknown"] > 0)


def _pairs(driver: str, options: argparse.Namespace) -> list[Verdict]:
    """Run pairs of a driver's settings, print what fails, and return its verdicts.

    Args:
        driver: The driver's name.
        options: Those of the command; ``pairs`` is the strategy.
    """
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.drivers import find_driver
    from pytest_distcompat.engine import local_runner
    from pytest_distcompat.ext.upstream.sweep.pairs import covering_rows, reduced_failures
    from pytest_distcompat.ext.upstream.sweep.profile import with_set
    from pytest_distcompat.known import applying, names_in_issues, shipped

    strategy = options.pairs
    kind = find_driver(driver)

    def cell_of(row: Row) -> Cell:
        return with_set(kind, Cell(strategy, "fp32", 2), "+".join(row))

    values = _values_to_pair(driver, options, cell_of)
    rows = covering_rows(values)
    print(f"{driver}: {len(rows)} rows of {len(values)} settings under {strategy}")
    known = applying(shipped(), names_in_issues(kind), "cpu")
    failing_parts: list[Row] = []
    verdicts: list[Verdict] = []
    with local_runner(kind, [cell_of(row) for row in rows], device="cpu") as runner:
        tries = _Tries(runner, driver, known, cell_of)
        for row in rows:
            for part, outcome in reduced_failures(row, tries.outcome, tuple(failing_parts)):
                # Later rows are tried without it.
                failing_parts.append(part)
                settings = " + ".join(part)
                print(f"{settings}\n    {outcome}")
                verdict = tries.verdict(part)
                assert verdict is not None
                cell = shlex.quote(verdict.cell)
                command = f"distcompat trace {driver} {cell} --check {verdict.check}"
                print(f"    {command}", flush=True)
                reported = _of_pairs(verdict, driver, strategy, len(row), command)
                verdicts.append(reported)
    return verdicts


@dataclass
class _Tries:
    """Runs rows of settings, each once.

    Attributes:
        runner: Runs cells.
        driver: The driver's name.
        known: Known issues of the libraries: failures that are expected.
        cell_of: Returns the cell, a configuration to run, that has the settings of a row.
        verdict_by_row: The first failure of each row that was run; None if there was none.
    """

    runner: Runner
    driver: str
    known: Sequence[Expectation]
    cell_of: Callable[[Row], Cell]
    verdict_by_row: dict[Row, Verdict | None] = field(default_factory=dict)

    def verdict(self, row: Row) -> Verdict | None:
        """Return the first failure of a row; None if there is none."""
        if row not in self.verdict_by_row:
            cell = self.cell_of(row)
            failure = _first_failure(self.runner, self.driver, cell, self.known)
            self.verdict_by_row[row] = failure
        return self.verdict_by_row[row]

    def outcome(self, row: Row) -> str:
        """Return how a row fails, in one line; empty if it does not."""
        verdict = self.verdict(row)
        if verdict is None:
            return ""
        explanation = verdict.message or verdict.reason
        first_line = explanation.splitlines()[0][:200]
        return f"{verdict.check}: {verdict.status}: {first_line}"


def _values_to_pair(
    driver: str, options: argparse.Namespace, cell_of: Callable[[Row], Cell]
) -> dict[str, list[str]]:
    """Return setting -> its values that are tried in pairs: ``{"AdamW.amsgrad": ["true"]}``.

    With a report of the profile ``sweep`` they are those that passed alone in it.

    Args:
        driver: The driver's name.
        options: Those of the command.
        cell_of: Returns the cell of some settings.
    """
    passed_by_cell: dict[str, bool] = {}
    if options.report:
        passed_by_cell = _passed_by_cell(Report.read(options.report))
    values_by_name: dict[str, list[str]] = {}
    for setting in _chosen(driver, options):
        if options.pairs not in setting.strategies:
            continue
        if setting.precision != "fp32" or setting.options or setting.without:
            # Settings that need another precision or option, or change the training on purpose, are
            # tried alone.
            continue
        values = []
        for value in setting.values:
            if options.report:
                cell = cell_of((f"{setting.name}={value}",))
                if not passed_by_cell.get(cell.id):
                    continue
            values.append(value)
        if values:
            values_by_name[setting.name] = values
    return values_by_name


def _passed_by_cell(report: Report) -> dict[str, bool]:
    """Return for each cell of a report, by its id, whether all its checks passed."""
    passed_by_cell: dict[str, bool] = {}
    for result in report.results:
        passed_before = passed_by_cell.get(result.cell, True)
        passed_by_cell[result.cell] = passed_before and result.status == "passed"
    return passed_by_cell


def _first_failure(
    runner: Runner, driver: str, cell: Cell, known: Sequence[Expectation]
) -> Verdict | None:
    """Return the first verdict of a sweep's checks on the cell that is red or a refusal.

    A refusal is an error of the library about a setting before the first step. None if all checks
    pass.

    Args:
        runner: Runs the cell.
        driver: The driver's name.
        cell: The cell.
        known: Known issues of the libraries: failures that are expected.
    """
    from pytest_distcompat.checks import CHECKS
    from pytest_distcompat.drivers import find_driver
    from pytest_distcompat.engine import not_applicable, run_check
    from pytest_distcompat.ext.upstream.sweep.slice import SWEEP_CHECKS

    for name in SWEEP_CHECKS:
        check = CHECKS.get(name)
        if not_applicable(check, cell, find_driver(driver), {}):
            continue
        verdict, *_ = run_check(runner, driver, cell, check, known)
        if verdict.status.red or verdict.status == "refused":
            return verdict
    return None


def _of_pairs(verdict: Verdict, driver: str, strategy: str, size: int, command: str) -> Verdict:
    """Return the verdict of a smallest part as a report has it.

    Args:
        verdict: The verdict of the part's cell.
        driver: The driver's name.
        strategy: The strategy.
        size: How many settings the row had that the part was reduced from.
        command: The command that runs the part alone.
    """
    suite = f"pairs under {strategy}"
    text = f"{verdict.message}\n\nthe smallest part that fails of a row of {size} settings"
    case = f"{verdict.cell}:{verdict.check}"
    nodeid = f"{suite} of {driver}::test[{case}]"
    return dataclasses.replace(
        verdict, message=text, reproduce=command, suite=suite, driver=driver, nodeid=nodeid
    )
