"""Table setting x strategy of the cells that set fields of libraries, and those of its rows that fail or are refused."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_distcompat.grouping import grouped
from pytest_distcompat.report.document import facets
from pytest_distcompat.report.result import Table
from pytest_distcompat.status import Status, Verdict


def settings_tables(results: Iterable[Verdict]) -> list[Table]:
    """Return, for each suite that ran settings, their worst verdicts: a row for each setting, a column for each strategy.

    Settings of one cell are one row. A refusal counts as worse than a success, so that its message is found.
    """
    suites = grouped(((one.suite, one.place), one) for one in results if facets(one.cell).get("set"))
    return [_table(found) for found in suites.values()]


def failing(table: Table) -> list[tuple[str, list[tuple[str, Verdict]]]]:
    """Return the settings that fail or are refused, each with the strategies and verdicts; those that fail come first."""
    found = []
    for setting in table.cells:
        verdicts = [(strategy, one) for strategy in table.checks if (one := table.found.get((setting, strategy)))]
        bad = [(strategy, one) for strategy, one in verdicts if one.red or one.status is Status.REFUSED]
        found += [(setting, bad)] if bad else []
    return sorted(found, key=lambda row: not any(verdict.red for _, verdict in row[1]))


def _table(results: Iterable[Verdict]) -> Table:
    worst: dict[tuple[str, str], Verdict] = {}
    for result in results:
        cell = facets(result.cell)
        names = " + ".join(setting.partition("=")[0] for setting in str(cell["set"]).split("+"))
        held = worst.setdefault((names, str(cell["strategy"])), result)
        if _rank(result) > _rank(held):
            worst[names, str(cell["strategy"])] = result
    settings, strategies = (tuple(dict.fromkeys(key[at] for key in worst)) for at in (0, 1))
    return Table(tuple(worst.values()), strategies, settings, worst)


def _rank(verdict: Verdict) -> tuple[int, bool]:
    return verdict.status.weight, verdict.status is not Status.PASSED
