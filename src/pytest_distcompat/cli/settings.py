"""``settings``: lists the settings that the profile ``sweep`` tries, and tries pairs of them."""

from __future__ import annotations

import argparse
import functools
import shlex
from pathlib import Path
from typing import Any

from pytest_distcompat.cli.output import table


def add(commands: Any) -> None:
    """Add the subcommand to the parser's."""
    parser = commands.add_parser(
        "settings",
        help="the settings of the installed libraries that the profile sweep tries",
        description="List the settings of the installed libraries, or try pairs of them. Exit code 1: a field has neither values "
        "to try nor a rule, or a pair fails.",
    )
    parser.add_argument(
        "--driver", action="append", metavar="NAME", help="only of this driver (default: all built-in ones)"
    )
    parser.add_argument("--pairs", metavar="STRATEGY", help="try all pairs of values under this strategy")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="pair only what passed alone in this report of the profile sweep"
    )
    parser.set_defaults(call=_settings, finds_drivers=True)


def _settings(options: argparse.Namespace) -> int:
    from pytest_distcompat.drivers import DRIVERS

    names = options.driver or DRIVERS.names()
    return max(_pairs(name, options.pairs, options.report) if options.pairs else _list(name) for name in names)


def _list(driver: str) -> int:
    from pytest_distcompat.drivers import find_driver
    from pytest_distcompat.settings.rules import settings_of

    found = settings_of(find_driver(driver).sources)
    rows = [(one.name, one.state, " ".join([*one.values, *one.twice]), one.reason) for one in found]
    states = ("swept", "hinted", "excluded", "unknown")
    counts = {state: sum(one.state == state for one in found) for state in states}
    cells = sum(len(one.cells) * len(one.strategies) for one in found)
    print("\n".join(table(("setting", "state", "values", "reason"), rows)))
    counted = ", ".join(f"{number} {state}" for state, number in counts.items())
    print(f"{driver}: {len(found)} settings, {counted}; {cells} cells")
    return int(counts["unknown"] > 0)


def _pairs(driver: str, strategy: str, report: Path | None) -> int:
    """Run a covering array of the settings, reduce each row that fails, and print what is left of it."""
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.checks import CHECKS
    from pytest_distcompat.drivers import find_driver
    from pytest_distcompat.engine import local_runner, not_applicable, run_check
    from pytest_distcompat.known import applying, concerned, shipped
    from pytest_distcompat.profiles import SWEEP_CHECKS
    from pytest_distcompat.report.document import Report
    from pytest_distcompat.settings.pairs import covering_rows, reduced_failures
    from pytest_distcompat.settings.rules import settings_of

    kind = find_driver(driver)
    passed: dict[str, bool] = {}
    for one in Report.read(report).results if report else ():
        passed[one.cell] = passed.get(one.cell, True) and one.status == "passed"

    def cell_of(row: tuple[str, ...]) -> Cell:
        return Cell.of(strategy, "fp32", 2, model="mlp", set="+".join(row))

    values: dict[str, list[str]] = {}
    for setting in settings_of(kind.sources):
        # Settings that need another precision or option, or change the training on purpose, are tried alone.
        if strategy in setting.strategies and setting.precision == "fp32" and not (setting.options or setting.without):
            found = [one for one in setting.values if not report or passed.get(cell_of((f"{setting.name}={one}",)).id)]
            values |= {setting.name: found} if found else {}
    rows = covering_rows(values)
    print(f"{driver}: {len(rows)} rows of {len(values)} settings under {strategy}")
    red: set[tuple[str, ...]] = set()
    known = applying(shipped(), concerned(kind), "cpu")
    with local_runner(kind, map(cell_of, rows), device="cpu") as runner:

        @functools.cache
        def outcome(row: tuple[str, ...]) -> str:
            cell = cell_of(row)
            for name in SWEEP_CHECKS:
                if not not_applicable(CHECKS.get(name), cell, kind, {}):
                    verdict = run_check(runner, driver, cell, CHECKS.get(name), known)[0]
                    if verdict.status.red or verdict.status == "refused":
                        return f"{name}: {verdict.status}: {(verdict.message or verdict.reason).splitlines()[0][:200]}"
            return ""

        for row in rows:
            for part, how in reduced_failures(row, outcome, tuple(red)):
                red.add(part)
                print(f"{' + '.join(part)}\n    {how}")
                check = how.partition(":")[0]
                print(f"    distcompat trace {driver} {shlex.quote(cell_of(part).id)} --check {check}", flush=True)
    return int(any(": refused: " not in outcome(part) for part in red))
