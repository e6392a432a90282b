"""Tables of the cells that set fields of libraries: settings as rows, strategies as columns.

A *cell* is a configuration of a trainer, as ``ddp-fp32-w2``: strategy, precision, 2 ranks. Some
cells have the option ``set``, a *setting*: a field of an object of a library and its value, as
``TrainingArguments.optim=sgd``, or several joined by ``+``. A suite may have hundreds of them, each
under several strategies, and a *verdict* (passed, failed, refused, ...) on each check. In the
suite's matrix each would be a row with all *checks*, so the formats of a report also show them in a
table of their own: ``text.settings_text`` in the terminal, ``markdown`` and ``html``. They call
``settings_tables``, and ``failing`` for what is wrong in such a table. The table is a
``result.Table``, whose ``cells`` and ``checks`` have settings and strategies here. A verdict is
*red* if it makes the session fail.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_distcompat.report.document import facets
from pytest_distcompat.report.result import Table, by_suite
from pytest_distcompat.status import Status, Verdict


def settings_tables(results: Iterable[Verdict]) -> list[Table]:
    """Return a table for each suite that has cells with settings.

    In a table ``cells`` are the settings (rows), ``checks`` are the strategies (columns), and
    ``verdicts`` has the worst verdict of all checks at each place. If a cell has several settings,
    they share a row.
    """
    # Of ``ddp-fp32-w2-set_AdamW.lr=0.1`` the facets are ``{"strategy": "ddp", "precision": "fp32",
    # "world_size": 2, "set": "AdamW.lr=0.1"}``.
    with_settings = [result for result in results if facets(result.cell).get("set")]
    return [_table(suite_results) for suite_results in by_suite(with_settings)]


@dataclass(frozen=True)
class FailingSetting:
    """A setting that fails or is refused under some strategy.

    Attributes:
        setting: The name of the setting; of several settings of one cell the names, joined by
            ``+``.
        verdicts: A strategy to the verdict, where that is a failure or a refusal (the trainer said
            that it does not support the cell).
    """

    setting: str
    verdicts: dict[str, Verdict]

    @property
    def red(self) -> bool:
        """Tell whether the setting fails under any strategy."""
        return any(verdict.red for verdict in self.verdicts.values())


def failing(table: Table) -> list[FailingSetting]:
    """Return the settings of a table that fail or are refused; those that fail come first."""
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
    """Return the table of one suite, from all verdicts of cells with settings."""
    worst: dict[tuple[str, str], Verdict] = {}
    # Dicts, because they keep the order and have each only once.
    settings: dict[str, None] = {}
    strategies: dict[str, None] = {}
    for result in results:
        cell = facets(result.cell)
        setting = _setting_names(str(cell["set"]))
        strategy = str(cell["strategy"])
        settings[setting] = None
        strategies[strategy] = None
        key = (setting, strategy)
        if key not in worst or _badness(result) > _badness(worst[key]):
            worst[key] = result
    return Table(
        results=tuple(worst.values()),
        checks=tuple(strategies),
        cells=tuple(settings),
        verdicts=worst,
    )


def _setting_names(option: str) -> str:
    """Return the names in a cell's option ``set`` without the values: ``a + b`` for ``a=1+b=2``."""
    names = [setting.partition("=")[0] for setting in option.split("+")]
    return " + ".join(names)


def _badness(verdict: Verdict) -> tuple[int, bool]:
    """Return what verdicts are compared by: it is larger for a worse one.

    ``weight`` orders the statuses; a failure weighs most. A verdict of a status other than passed
    is worse than a success of equal weight, so that its message is not lost.
    """
    return verdict.status.weight, verdict.status is not Status.PASSED
