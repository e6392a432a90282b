"""``settings``: lists the settings that the profile ``sweep`` tries, and tries pairs of them."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat import clock
from pytest_distcompat.cli.output import WRITTEN, columns, fitted, report_file, table, write_reports
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report.document import Report

if TYPE_CHECKING:
    from pytest_distcompat.settings.rules import Setting
    from pytest_distcompat.status import Verdict

#: The states of a setting: swept by its type, by rules, left out, or neither values nor a rule.
STATES = ("swept", "hinted", "excluded", "unknown")
#: Lines below the name of a setting. Values are long words, to be copied.
_INDENTED: dict[str, Any] = {"initial_indent": "    ", "subsequent_indent": "    "}
_INDENTED |= dict.fromkeys(("break_on_hyphens", "break_long_words"), False)


def add(commands: Any) -> None:
    """Add the subcommand to the parser's."""
    parser = commands.add_parser(
        "settings",
        help="the settings of the installed libraries that the profile sweep tries",
        description="List the settings of the installed libraries, or try pairs of them. Exit code 1: a field has neither values "
        "to try nor a rule, or a pair fails.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="only settings with this part in their name, or as this pattern has it (ds_config.*offload*); shown in full",
    )
    parser.add_argument(
        "--state",
        choices=STATES,
        help="only settings in this state: with values of their type, of rules, left out, or neither",
    )
    parser.add_argument(
        "--driver", action="append", metavar="NAME", help="only of this driver (default: all built-in ones)"
    )
    parser.add_argument("--pairs", metavar="STRATEGY", help="try all pairs of values under this strategy")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="pair only what passed alone in this report of the profile sweep"
    )
    parser.add_argument(
        "-o", "--output", type=report_file, default=[], action="append", metavar="FILE", help=f"of the pairs, {WRITTEN}"
    )
    parser.set_defaults(call=_settings, finds_drivers=True)


def _settings(options: argparse.Namespace) -> int:
    from pytest_distcompat.drivers import DRIVERS

    names = options.driver or DRIVERS.names()
    if not options.pairs:
        if options.output:
            raise UsageProblem("--output is for --pairs")
        chosen = {name: _chosen(name, options) for name in names}
        if options.names and not any(chosen.values()):
            raise UsageProblem(f"no setting of {', '.join(names)} is named {' or '.join(options.names)}")
        return max(_list(name, settings, options) for name, settings in chosen.items())
    began = clock.wall()
    found = [verdict for name in names for verdict in _pairs(name, options)]
    write_reports(options.output, _report(found, began))
    return int(any(verdict.red for verdict in found))


def _report(found: list[Verdict], began: float) -> Report:
    """Return the report of the smallest sets of settings that fail."""
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
    return Report(session, found)


def _chosen(driver: str, options: argparse.Namespace) -> list[Setting]:
    """Return the settings of a driver that the command is about."""
    from pytest_distcompat.drivers import find_driver
    from pytest_distcompat.settings.rules import settings_of

    patterns = [_pattern(name) for name in options.names]

    def is_chosen(setting: Setting) -> bool:
        if options.state not in {None, setting.state}:
            return False
        name = setting.name.lower()
        return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    return list(filter(is_chosen, settings_of(find_driver(driver).sources)))


def _pattern(name: str) -> str:
    """Return the lower-case pattern of a name that the user gave: one without signs may be any part of a setting's name."""
    if any(sign in name for sign in "*?["):
        return name.lower()
    return f"*{name.lower()}*"


def _values(setting: Setting) -> str:
    return " ".join([*setting.values, *setting.twice])


def _list(driver: str, found: list[Setting], options: argparse.Namespace) -> int:
    width = columns()
    if options.names:
        for one in found:
            print(f"{one.name}: {one.state}")
            for text in filter(None, (_values(one), one.reason)):
                print(*textwrap.wrap(text, width or len(text) + 4, **_INDENTED), sep="\n")
    else:
        # Some values are long, so that what follows them is no column of its own.
        rows = [(one.name, one.state, "; ".join(filter(None, (_values(one), one.reason)))) for one in found]
        print("\n".join(fitted(line, width) for line in table(("setting", "state", "values; reason"), rows)))
    counts = {state: sum(one.state == state for one in found) for state in STATES}
    cells = sum(len(one.cells) * len(one.strategies) for one in found)
    counted = ", ".join(f"{number} {state}" for state, number in counts.items())
    print(f"{driver}: {len(found)} settings, {counted}; {cells} cells")
    return int(counts["unknown"] > 0)


def _pairs(driver: str, options: argparse.Namespace) -> list[Verdict]:  # noqa: C901 - one loop over rows, with two helpers inside
    """Run a covering array of the settings, reduce each row that fails, print what is left of it, and return the verdicts."""
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.checks import CHECKS
    from pytest_distcompat.drivers import find_driver
    from pytest_distcompat.engine import local_runner, not_applicable, run_check
    from pytest_distcompat.known import applying, concerned, shipped
    from pytest_distcompat.profiles import SWEEP_CHECKS, with_set
    from pytest_distcompat.settings.pairs import covering_rows, reduced_failures

    strategy, report = options.pairs, options.report
    kind = find_driver(driver)
    passed: dict[str, bool] = {}
    for one in Report.read(report).results if report else ():
        passed[one.cell] = passed.get(one.cell, True) and one.status == "passed"

    def cell_of(row: tuple[str, ...]) -> Cell:
        return with_set(kind, Cell(strategy, "fp32", 2), "+".join(row))

    values: dict[str, list[str]] = {}
    for setting in _chosen(driver, options):
        # Settings that need another precision or option, or change the training on purpose, are tried alone.
        if strategy in setting.strategies and setting.precision == "fp32" and not (setting.options or setting.without):
            sound = [one for one in setting.values if not report or passed.get(cell_of((f"{setting.name}={one}",)).id)]
            values |= {setting.name: sound} if sound else {}
    rows = covering_rows(values)
    print(f"{driver}: {len(rows)} rows of {len(values)} settings under {strategy}")
    red: set[tuple[str, ...]] = set()
    verdicts: dict[tuple[str, ...], Verdict] = {}
    found: list[Verdict] = []
    known = applying(shipped(), concerned(kind), "cpu")
    with local_runner(kind, map(cell_of, rows), device="cpu") as runner:

        @functools.cache
        def outcome(row: tuple[str, ...]) -> str:
            cell = cell_of(row)
            for name in SWEEP_CHECKS:
                if not not_applicable(CHECKS.get(name), cell, kind, {}):
                    verdict = run_check(runner, driver, cell, CHECKS.get(name), known)[0]
                    if verdict.status.red or verdict.status == "refused":
                        verdicts[row] = verdict
                        return f"{name}: {verdict.status}: {(verdict.message or verdict.reason).splitlines()[0][:200]}"
            return ""

        for row in rows:
            for part, how in reduced_failures(row, outcome, tuple(red)):
                red.add(part)
                print(f"{' + '.join(part)}\n    {how}")
                verdict = verdicts[part]
                command = f"distcompat trace {driver} {shlex.quote(verdict.cell)} --check {verdict.check}"
                print(f"    {command}", flush=True)
                found.append(_of_pairs(verdict, driver, strategy, len(row), command))
    return found


def _of_pairs(verdict: Verdict, driver: str, strategy: str, size: int, command: str) -> Verdict:
    """Return the verdict of a smallest part as a report has it."""
    suite = f"pairs under {strategy}"
    text = f"{verdict.message}\n\nthe smallest part that fails of a row of {size} settings"
    nodeid = f"{suite} of {driver}::test[{verdict.cell}:{verdict.check}]"
    return dataclasses.replace(verdict, message=text, reproduce=command, suite=suite, driver=driver, nodeid=nodeid)
