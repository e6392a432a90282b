"""A budget starts with what is not known to be green, then goes by a seed."""

from __future__ import annotations

import pytest

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.plugin.suite.budget import Budget, read_budget
from pytest_distcompat.report.document import Report
from pytest_distcompat.status import Status, Verdict

CELLS = [f"ddp-fp32-w2-set_A.b={n}" for n in range(40)]


def in_order(seed: int, last: Report | None = None) -> list[str]:
    order = Budget(60, seed).order(last)
    return sorted(CELLS, key=lambda cell: order("torch", cell))


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("2h@7", 7200)])
def test_a_budget_is_a_time_and_perhaps_a_seed(text: str, seconds: float) -> None:
    budget = read_budget(text)
    assert budget is not None
    assert budget.seconds == seconds
    assert budget.seed == 7 or "@" not in text


@pytest.mark.parametrize("text", ["20", "0m", "m", "20m@", "20m@x", "-1m"])
def test_what_is_no_budget_is_a_usage_problem(text: str) -> None:
    with pytest.raises(UsageProblem, match="expected a time and perhaps a seed"):
        read_budget(text)


def test_no_budget_is_none() -> None:
    assert read_budget("") is None


def test_a_seed_is_an_order() -> None:
    assert in_order(1) == in_order(1) != in_order(2)
    assert set(in_order(1)) == set(CELLS)


def test_cells_that_never_ran_or_were_red_come_first() -> None:
    def result(cell: str, status: str) -> Verdict:
        return Verdict("names", cell, Status.from_name(status), driver="torch")

    last = Report(
        results=[
            result(CELLS[0], "failed"),
            result(CELLS[1], "skipped"),
            *(result(cell, "passed") for cell in CELLS[2:]),
        ]
    )
    assert set(in_order(3, last)[:2]) == {CELLS[0], CELLS[1]}
