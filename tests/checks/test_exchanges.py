"""Check ``exchanges`` on hand-made traces: what functions by which ranks exchange values gave them."""

from __future__ import annotations

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.trace import ExchangeInfo, RunTrace, Snapshot, Trace

SOUND = ExchangeInfo("gather", "bool", "bool (1,) [True]", "bool (2,) [True, False]", "bool (2,) [True, False]")
WIDENED = ExchangeInfo("gather", "bool", "bool (1,) [True]", "bool (2,) [True, False]", "int64 (2,) [1, 0]")
REFUSED = ExchangeInfo("split", "tuple", "(0, 1, 2)", "(0, 1)", error="TypeError: not a list")
CHANGED = ExchangeInfo("split", "dict", "{'x': [0, 1]}", "{'x': [0]}", "{'x': [0]}", changed="{'x': [0]}")


def trace(*ranks: tuple[ExchangeInfo, ...]) -> Trace:
    """Return the trace of a run in which these calls gave each rank something."""
    snapshots = [Snapshot(rank, "exchanges", "exchanges", 0, exchanges=infos) for rank, infos in enumerate(ranks)]
    return Trace.of("made", [RunTrace("exchanges", len(snapshots), tuple(snapshots))])


def findings(*ranks: tuple[ExchangeInfo, ...]) -> list[str]:
    """Return the findings of the check."""
    return CHECKS.get("exchanges").findings(Cell("ddp", "fp32"), trace(*ranks))


def test_each_rank_gets_what_it_should() -> None:
    assert findings((SOUND,), (SOUND,)) == []


def test_a_dtype_is_another_on_one_rank() -> None:
    assert findings((WIDENED,), (SOUND,)) == [
        "gather of bool: rank 0: gets int64 (2,) [1, 0]; expected bool (2,) [True, False]"
    ]


def test_an_error_is_shown_beside_what_was_expected() -> None:
    assert findings((SOUND,), (SOUND, REFUSED)) == ["split of tuple: rank 1: TypeError: not a list; expected (0, 1)"]


def test_a_value_is_changed_although_the_result_is_right() -> None:
    values = "from {'x': [0, 1]} to {'x': [0]}"
    assert findings((CHANGED,), (SOUND,)) == [
        f"split of dict: rank 0: it changes the value that it is called with {values}"
    ]


def test_a_long_value_is_shown_around_the_first_difference() -> None:
    expected = f"[{', '.join(map(str, range(200)))}]"
    got = expected.replace("150,", "-1,")
    (finding,) = findings((ExchangeInfo("gather", "int64", "[1]", expected, got),), (SOUND,))
    assert finding.startswith("gather of int64: rank 0: gets ... ")
    seen, _, wanted = finding.partition("; expected ")
    assert ", 149, -1, 151, " in seen
    assert ", 149, 150, 151, " in wanted
    assert wanted.endswith(" ...")
    assert len(finding) < 350


def test_a_long_error_is_shown_in_part() -> None:
    info = ExchangeInfo("gather", "int64", "[1]", "[1]", error=f"TypeError: {'no ' * 200}")
    (finding,) = findings((info,), (SOUND,))
    assert finding.startswith("gather of int64: rank 0: TypeError: no no ")
    assert finding.endswith("; expected [1]")
    assert len(finding) < 200


def test_a_driver_that_names_no_function() -> None:
    assert findings((), ()) == ["rank 0: exchanges() names no function", "rank 1: exchanges() names no function"]


def test_a_silent_rank() -> None:
    assert findings((SOUND,)) == ["rank 1: no report after exchanges"]


def test_where_it_applies() -> None:
    check = CHECKS.get("exchanges")
    assert check.not_applicable(Cell("ddp", "fp32"), Driver) == "the driver has no exchanges()"
    assert check.not_applicable(Cell("ddp", "fp32"), AccelerateDriver) is None
    assert check.not_applicable(Cell("fsdp2", "fp32"), AccelerateDriver) == (
        "ranks exchange values alike in all cells, and that is tested in ddp-fp32"
    )
    on_mesh = check.not_applicable(Cell.of("fsdp2", "fp32", tp=2), AccelerateDriver)
    assert on_mesh == "on a mesh ranks exchange values as they do without one, where it is tested"
