"""Table setting x strategy of the cells that set fields of libraries, and those of its rows that fail or are refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_distcompat.grouping import grouped
from pytest_distcompat.report.document import facets
from pytest_distcompat.report.result import Table
from pytest_distcompat.status import Status, Verdict


def settings_tables(results: Iterable[Verdict]) -> list[Table]:
    """Return, for each suite that ran settings, their worst verdicts: a row for each setting, a column for each strategy.

    Settings of one cell are one row. A refusal counts as worse than a success, so that its message is found.
    """
    of_settings = [result for result in results if facets(result.cell).get("set")]
    results_by_suite = grouped(((result.suite, result.place), result) for result in of_settings)
    return [_table(suite_results) for suite_results in results_by_suite.values()]


@dataclass(frozen=True)
class FailingSetting:
    """A setting that fails or is refused, or several of one cell, joined by ``+``.

    Attributes:
        setting: Its name.
        verdicts: The verdict on each strategy under which it fails or is refused.
    """

    setting: str
    verdicts: dict[str, Verdict]

    @property
    def red(self) -> bool:
        """Tell whether it fails under any strategy."""
        return any(verdict.red for verdict in self.verdicts.values())


def failing(table: Table) -> list[FailingSetting]:
    """Return the settings that fail or are refused; those that fail come first."""
    rows = []
    for setting in table.cells:
        verdicts = {}
        for strategy in table.checks:
            verdict = table.verdicts.get((setting, strategy))
            if verdict and (verdict.red or verdict.status is Status.REFUSED):
                verdicts[strategy] = verdict
        if verdicts:
            rows.append(FailingSetting(setting, verdicts))
    return sorted(rows, key=lambda row: not row.red)


def _table(results: Iterable[Verdict]) -> Table:
    worst: dict[tuple[str, str], Verdict] = {}
    for result in results:
        cell = facets(result.cell)
        key = (_setting_names(str(cell["set"])), str(cell["strategy"]))
        if key not in worst or _rank(result) > _rank(worst[key]):
            worst[key] = result
    settings = dict.fromkeys(setting for setting, _ in worst)
    strategies = dict.fromkeys(strategy for _, strategy in worst)
    return Table(tuple(worst.values()), tuple(strategies), tuple(settings), worst)


def _setting_names(option: str) -> str:
    """Return the names in a cell's option ``set`` without their values: ``a + b`` of ``a=1+b=2``."""
    names = [setting.partition("=")[0] for setting in option.split("+")]
    return " + ".join(names)


def _rank(verdict: Verdict) -> tuple[int, bool]:
    return verdict.status.weight, verdict.status is not Status.PASSED
