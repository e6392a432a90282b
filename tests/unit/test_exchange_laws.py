"""Laws of exchanges: what each rank should get of generated values; and the calls on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pytest_distcompat.exchanges import (
    AnyRank,
    Broadcasts,
    BroadcastsLists,
    Exchange,
    Gathers,
    GathersLists,
    Law,
    OnRank,
    Pads,
    Reduces,
    Splits,
)
from pytest_distcompat.exchanges.calls import call_all
from pytest_distcompat.exchanges.nested import described
from pytest_distcompat.world import World

torch = pytest.importorskip("torch")

RANKS = 3


def got(law: Law, name: str, rank: int) -> str:
    """Return what a rank should get of the value of that name, as text."""
    make = law.values(RANKS)[name]
    return described(law.expected([make(other) for other in range(RANKS)], rank))


@pytest.mark.parametrize(
    ("law", "name", "rank", "expected"),
    [
        (Gathers(), "no dimension", 0, "float32 (3,) [1.0, 3.0, 5.0]"),
        (Gathers(), "bool", 1, "bool (6, 3) "),
        (Gathers(), "no element", 1, "float32 (0, 3) []"),
        (Gathers(), "tuple", 0, "(float32 (6,) [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],)"),
        (Gathers(), "named tuple", 0, "Pair(loss=float32 (3,) [1.0, 3.0, 5.0], logits=float32 (3, 2) "),
        (Gathers(), "dict in a list", 0, "[{'x': float32 (3,) [1.0, 3.0, 5.0], 0: float32 (6,) "),
        (GathersLists(), "as many as the rank", 0, "[0, 0, 1]"),
        (Reduces("sum"), "uint8", 0, "uint8 (2, 3) [[9, 12, 15], [18, 21, 24]]"),
        (Reduces("mean"), "bfloat16", 2, "bfloat16 (2, 3) [[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]"),
        (Reduces("max"), "int32", 1, "int32 (2, 3) [[5, 6, 7], [8, 9, 10]]"),
        (Broadcasts(-1), "one element", 0, "float32 (1,) [5.0]"),
        (Broadcasts(1), "one element", 0, "float32 (1,) [3.0]"),
        (BroadcastsLists(), "texts", 2, "['text 0', '']"),
        (Pads(), "bool", 0, "bool (3, 2) [[False, True], [False, False], [False, False]]"),
        (Pads(first=True), "int64", 1, "int64 (3, 2) [[0, 0], [3, 4], [5, 6]]"),
        (Pads(dim=-1, padding=-100), "int64", 0, "int64 (2, 3) [[1, -100, -100], [2, -100, -100]]"),
        (Pads(), "equally many", 0, "float32 (2, 2) [[1.0, 2.0], [3.0, 4.0]]"),
        (Splits(), "list", 0, "[0, 1, 2]"),
        (Splits(), "list", 2, "[5, 6]"),
        (Splits(), "list of one", 1, "[]"),
        (Splits(padded=True), "list of one", 1, "['alone']"),
        (Splits(padded=True), "tuple", 2, "(5, 6, 6)"),
        (Splits(padded=True), "tensor of one row", 2, "int64 (1, 2) [[0, 1]]"),
        (Splits(), "dict of lists", 1, "{'prompt': ['d', 'e'], 'id': [3, 4]}"),
        (OnRank(-1), "a number", 2, "3"),
        (OnRank(-1), "a number", 0, "None"),
        (AnyRank(), "the last rank", 0, "True"),
        (AnyRank(), "no rank", 0, "False"),
    ],
    ids=str,
)
def test_what_a_rank_should_get(law: Law, name: str, rank: int, expected: str) -> None:
    assert got(law, name, rank).startswith(expected)


def test_the_dtypes_of_a_broadcast() -> None:
    values = Broadcasts(containers=False, dtypes=("bfloat16",)).values(RANKS)
    assert {str(make(0).dtype) for make in values.values()} == {"torch.bfloat16"}


@pytest.mark.parametrize(
    "law",
    [Gathers(), GathersLists(), Reduces("sum"), Broadcasts(), BroadcastsLists(), Pads(), Splits(), OnRank()],
    ids=str,
)
def test_each_value_is_made_anew(law: Law) -> None:
    """An exchange that changes it changes nothing of what is expected."""
    for name, make in law.values(RANKS).items():
        assert described(make(1)) == described(make(1)), name
        value = make(1)
        if hasattr(value, "zero_") and value.numel():
            value.detach().fill_(17)
            assert described(make(1)) != described(value), name


def test_a_value_is_described_by_type_and_dtype() -> None:
    values = [torch.tensor([1]), torch.tensor([1.0]), torch.tensor(1), [1], (1,), {"x": 1}, 1, True, "1"]
    texts = {described(value) for value in values}
    assert len(texts) == len(values)


def called(exchange: Exchange) -> Any:
    """Return what is recorded of the calls of one exchange in one process."""
    return list(call_all({"exchange": exchange}, World(0, 1, 0, "cpu")))


def test_sound_calls() -> None:
    infos = called(Exchange(lambda value: value, Splits()))
    assert len(infos) == len(Splits().values(1))
    for info in infos:
        assert (info.error, info.changed) == ("", "")
        assert info.got == info.expected


def test_a_value_that_a_function_is_not_made_for() -> None:
    def fails(value: Any) -> Any:
        if isinstance(value, tuple):
            raise TypeError("no tuples\nand more")
        return value

    (wrong,) = [info for info in called(Exchange(fails, Splits())) if info.error]
    assert (wrong.value_name, wrong.error, wrong.got) == ("tuple", "TypeError: no tuples", "")
    infos = called(Exchange(fails, Splits(), {"tuple": "it takes lists"}))
    assert "tuple" not in [info.value_name for info in infos]
    assert not [info for info in infos if info.error]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_value_that_is_changed(in_place: bool) -> None:
    def shortens(value: Any) -> Any:
        whole = type(value)(value) if isinstance(value, list) else value
        if isinstance(value, list):
            value.append(0)
        return whole

    changed = {
        info.value_name: info.changed
        for info in called(Exchange(shortens, Splits(), in_place=in_place))
        if info.changed
    }
    if in_place:
        assert changed == {}
    else:
        assert changed["list of one"] == "['alone', 0]"


class Doubles:
    """A law of a user's own."""

    def values(self, ranks: int) -> Any:
        return {"two": lambda rank: 2 * ranks + rank}

    def expected(self, values: Sequence[Any], rank: int) -> Any:
        return 2 * values[rank]


def test_a_law_of_ones_own() -> None:
    (info,) = called(Exchange(lambda value: value + value, Doubles()))
    assert (info.got, info.expected) == ("4", "4")
