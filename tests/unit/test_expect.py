"""Declarations of an adopter, and which cells they cover."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_distcompat import clock
from pytest_distcompat.cell import FACETS, OPTIONS, Cell
from pytest_distcompat.expect import Expectation, fails, refuses
from pytest_distcompat.failures import UsageProblem

CELL = Cell.of("fsdp2", "bf16_upcast", 2, compile=True)


NAMES = ", ".join(map(repr, OPTIONS["model"].values))


@pytest.mark.parametrize(
    ("facets", "covered"),
    [
        ({}, True),
        ({"strategy": "fsdp2"}, True),
        ({"strategy": "fsdp1"}, False),
        ({"strategy": ("ddp", "fsdp2")}, True),
        ({"strategy": ()}, False),
        ({"strategy": "fsdp2", "precision": "fp32"}, False),
        ({"world_size": 2}, True),
        ({"world_size": (4, 8)}, False),
        ({"compile": True}, True),
        ({"compile": False}, False),
        ({"compile": (False, True)}, True),
        # An option that the cell does not name is at its default.
        ({"model": "llama"}, True),
        ({"model": "mlp"}, False),
    ],
)
def test_an_expectation_covers_cells_by_their_facets(facets: dict[str, Any], *, covered: bool) -> None:
    assert fails("names", reason="a bug", **facets).covers(CELL, "names") is covered
    assert refuses("names", match="no", **facets).covers(CELL, "names") is covered


def test_an_expectation_is_of_one_check_or_of_all() -> None:
    assert not fails("names", reason="a bug").covers(CELL, "dtypes")
    assert refuses(match="no").covers(CELL, "dtypes")
    assert fails("*", reason="a bug").covers(CELL, "anything")


@pytest.mark.parametrize(
    ("match", "message", "matches"),
    [
        ("", "whatever", True),
        ("SHARDED", "cannot write SHARDED_STATE_DICT", True),
        (r"^rank \d:", "rank 1: stale", True),
        ("sharded", "cannot write SHARDED_STATE_DICT", False),
    ],
)
def test_a_match_is_searched_for(match: str, message: str, *, matches: bool) -> None:
    assert fails("names", reason="a bug", match=match).matches(message) is matches


@pytest.mark.parametrize(
    ("expectation", "text"),
    [
        (
            fails("names", reason="org/repo#1", strategy="fsdp2", compile=True),
            "fails('names', compile=True, strategy='fsdp2', reason='org/repo#1', match='')",
        ),
        (
            fails("names", reason="org/repo#1", match="_orig_mod", also="stale"),
            "fails('names', reason='org/repo#1', match='_orig_mod', also='stale')",
        ),
        (
            refuses(match="no offload", strategy=("ddp", "zero1")),
            "refuses('*', strategy=('ddp', 'zero1'), reason='', match='no offload')",
        ),
    ],
)
def test_an_expectation_reads_as_it_was_written(expectation: Expectation, text: str) -> None:
    assert str(expectation) == text


def make(kind: str, **facets: Any) -> Expectation:
    if kind == "fails":
        return fails("names", **{"reason": "a bug", **facets})
    return refuses("names", **{"match": "no", **facets})


@pytest.mark.parametrize("kind", ["fails", "refuses"])
@pytest.mark.parametrize(
    ("facets", "message"),
    [
        (
            {"stratgy": "ddp"},
            f"no facet named 'stratgy'. Known: {', '.join(FACETS)}",
        ),
        (
            {"model": "gpt"},
            "model has no value 'gpt'. Known: " + NAMES,
        ),
        (
            {"model": ("llama", "gpt")},
            "model has no value 'gpt'. Known: " + NAMES,
        ),
        ({"compile": "yes"}, "compile has no value 'yes'. Known: False, True, 'aot_eager', 'regional', 'partial'"),
        ({"match": "("}, "match='(' is no regular expression: missing ), unterminated subpattern at position 0"),
        ({"strategy": ["ddp", "fsdp2"]}, "strategy takes one value or a tuple of them, got ['ddp', 'fsdp2']"),
    ],
)
def test_a_wrong_word_lists_the_right_ones(kind: str, facets: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        make(kind, **facets)
    assert str(caught.value) == f"{kind}('names'): {message}"


def test_consequences_are_a_regular_expression_too() -> None:
    with pytest.raises(UsageProblem, match=r"^fails\('names'\): also='\(' is no regular expression: missing \)"):
        fails("names", reason="a bug", also="(")


def test_a_known_failure_needs_a_reason() -> None:
    with pytest.raises(UsageProblem, match=r"^fails\('names'\): say why, best with a link: reason='org/repo#1234'$"):
        fails("names", reason="")


def test_a_refusal_needs_a_message() -> None:
    with pytest.raises(UsageProblem, match=r"^refuses\('\*'\): give match=, the message that the user is to see$"):
        refuses(match="")


@pytest.mark.parametrize(("now", "ended"), [(0, False), (86399, False), (86400, True)])
def test_a_declaration_holds_to_the_end_of_its_last_day(
    now: int, *, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "wall", lambda: 1_796_083_200 + now)  # 2026-12-01, 00:00 UTC
    assert fails("names", reason="a bug", until="2026-12-01").ended is ended
    assert refuses(match="no", until="2026-12-01").ended is ended
    assert not fails("names", reason="a bug").ended


@pytest.mark.parametrize("until", ["soon", "2026-13-01", "2026-1-5", "20261201", "2026-12-01 12:00"])
def test_a_wrong_day_says_what_is_right(until: str) -> None:
    with pytest.raises(UsageProblem, match=rf"refuses\('\*'\): until={until!r}; expected a day, as '2026-12-01'"):
        refuses(match="no", until=until)


def test_an_expectation_for_cells_over_nodes() -> None:
    bug = fails("names", nodes=2, reason="org/repo#1")
    assert bug.covers(Cell("ddp", "fp32", 4, nodes=2), "names")
    assert not bug.covers(Cell("ddp", "fp32", 4), "names")
    with pytest.raises(UsageProblem, match="nodes takes a number, a lower bound as '>=2', or a tuple of them, got '2'"):
        fails("names", nodes="2", reason="org/repo#1")


@pytest.mark.parametrize(("wanted", "sizes"), [(">=2", [2, 3, 4, 12]), ((1, ">=4"), [1, 4, 12]), (2, [2])])
def test_a_world_size_may_be_a_lower_bound(wanted: Any, sizes: list[int]) -> None:
    bug = fails("names", world_size=wanted, reason="org/repo#1")
    covered = [size for size in (1, 2, 3, 4, 12) if bug.covers(Cell("ddp", "fp32", size), "names")]
    assert covered == sizes


@pytest.mark.parametrize("wanted", [">2", ">=0", ">= 2", ">=two", "<=2", ">=2,<4"])
def test_another_bound_is_an_error_that_says_how(wanted: str) -> None:
    with pytest.raises(UsageProblem, match="world_size takes a number, a lower bound as '>=2'"):
        fails("names", world_size=wanted, reason="org/repo#1")
