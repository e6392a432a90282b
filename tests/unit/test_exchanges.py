"""Contracts of exchanges: what each rank should get of generated values; and the calls on a rank."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pytest_distcompat.exchanges import (
    AnyRank,
    Broadcasts,
    BroadcastsLists,
    Contract,
    Exchange,
    Fills,
    Gathers,
    GathersLists,
    OnRank,
    Pads,
    Reduces,
    Splits,
)
from pytest_distcompat.exchanges.calls import call_all
from pytest_distcompat.exchanges.nested import as_text, to_device
from pytest_distcompat.world import World

torch = pytest.importorskip("torch")

RANKS = 3
CONTRACTS: tuple[Contract, ...] = (
    Gathers(),
    GathersLists(),
    Reduces("sum"),
    Reduces("mean"),
    Reduces("max"),
    Broadcasts(-1),
    BroadcastsLists(),
    Pads(),
    Pads(dim=-1, padding=-100),
    Fills(),
    Fills(dim=1),
    Splits(),
    Splits(padded=True),
    OnRank(),
    AnyRank(),
)


def values_of(contract: Contract, name: str, ranks: int = RANKS) -> list[Any]:
    """Return the value of that name of each rank."""
    make = contract.values(ranks)[name]
    return [make(rank) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("contract", "name", "rank", "expected"),
    [
        (Gathers(), "scalar", 0, "float32 (3,) [1.0, 3.0, 5.0]"),
        (Gathers(), "bool", 1, "bool (6, 3) "),
        (Gathers(), "empty", 1, "float32 (0, 3) []"),
        (Gathers(), "large integers", 1, "int64 (6,) [9007199254740993, -1, 9007199254740994, -1, "),
        (Gathers(), "tuple", 0, "(float32 (6,) [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],)"),
        (Gathers(), "named tuple", 0, "Pair(loss=float32 (3,) [1.0, 3.0, 5.0], logits=float32 (3, 2) "),
        (Gathers(), "dict in a list", 0, "[{'x': float32 (3,) [1.0, 3.0, 5.0], 0: float32 (6,) "),
        (GathersLists(), "empty on rank 0", 0, "[0, 0, 1]"),
        (Reduces("sum"), "uint8", 0, "uint8 (2, 3) [[3, 3, 3], [3, 3, 3]]"),
        (Reduces("mean"), "bfloat16", 2, "bfloat16 (2, 3) [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]"),
        (Reduces("max"), "int32", 1, "int32 (2, 3) [[2, 2, 2], [2, 2, 2]]"),
        (Broadcasts(-1), "one element", 0, "float32 (1,) [5.0]"),
        (Broadcasts(1), "one element", 0, "float32 (1,) [3.0]"),
        (BroadcastsLists(), "texts", 2, "['text 0', '']"),
        (Pads(), "bool", 0, "bool (3, 2) [[False, True], [False, False], [False, False]]"),
        (Pads(first=True), "int64", 1, "int64 (3, 2) [[0, 0], [3, 4], [5, 6]]"),
        (Pads(), "longest on rank 0", 2, "float32 (3, 2) [[5.0, 6.0], [0.0, 0.0], [0.0, 0.0]]"),
        (Pads(dim=-1, padding=-100), "int64", 0, "int64 (2, 3) [[1, -100, -100], [2, -100, -100]]"),
        (Pads(), "equally long", 0, "float32 (2, 2) [[1.0, 2.0], [3.0, 4.0]]"),
        (Fills(), "one row", 0, "float32 (3, 2) [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]"),
        (Fills(), "as many rows as ranks", 0, "float32 (3, 2) [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]"),
        (
            Fills(),
            "one row more than ranks",
            1,
            "float32 (6, 2) [[3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0], [9.0",
        ),
        (Fills(), "four rows for each rank", 0, "float32 (12, 2) "),
        (Fills(dim=1), "one row", 1, "float32 (2, 3) [[3.0, 3.0, 3.0], [4.0, 4.0, 4.0]]"),
        (Splits(), "list", 0, "[0, 1, 2]"),
        (Splits(), "list", 2, "[5, 6]"),
        (Splits(), "list of one", 1, "[]"),
        (Splits(padded=True), "list of one", 1, "['alone']"),
        (Splits(padded=True), "tuple", 2, "(5, 6, 6)"),
        (Splits(padded=True), "tensor of one row", 2, "int64 (1, 2) [[0, 1]]"),
        (Splits(), "dict of lists", 1, "{'id': [3, 4], 'prompt': ['prompt 3', 'prompt 4']}"),
        (OnRank(-1), "a number", 2, "3"),
        (OnRank(-1), "a number", 0, "None"),
        (OnRank(7), "a number", 1, "None"),
        (AnyRank(), "rank 0", 2, "True"),
        (AnyRank(), "no rank", 0, "False"),
    ],
    ids=str,
)
def test_what_a_rank_should_get(contract: Contract, name: str, rank: int, expected: str) -> None:
    assert as_text(contract.expected(values_of(contract, name), rank)).startswith(expected)


def added(parts: Sequence[Any], divided_by: int) -> Any:
    """Return the sum of tensors, one after another in their dtype, each divided first."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part / divided_by
    return total


@pytest.mark.parametrize("ranks", [*range(1, 11), 16, 32, 64])
def test_sums_and_means_are_exact_in_any_order(ranks: int) -> None:
    """Else a sound reduction would be red, which adds up in another order or divides first."""
    for dtype in ("float32", "bfloat16", "float16", "float64", "uint8"):
        for operation in ("sum", "mean"):
            contract = Reduces(operation)
            if dtype not in contract.values(ranks):
                continue
            parts = values_of(contract, dtype, ranks)
            exact = sum(part.double() for part in parts)
            if operation == "mean":
                exact = exact / ranks
            assert torch.equal(contract.expected(parts, 0).double(), exact)
            if dtype == "uint8":
                continue
            for order in (parts, parts[::-1], parts[1::2] + parts[::2]):
                if operation == "sum":
                    assert torch.equal(added(order, 1).double(), exact), dtype
                else:
                    assert torch.equal(added(order, ranks).double(), exact), dtype
                    assert torch.equal((added(order, 1) / ranks).double(), exact), dtype


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_largest_is_on_each_rank_somewhere(ranks: int) -> None:
    """A helper that broadcasts one rank's tensor gives no maximum."""
    contract = Reduces("max")
    parts = values_of(contract, "float32", ranks)
    largest = contract.expected(parts, 0)
    assert not [rank for rank, part in enumerate(parts) if torch.equal(part, largest)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_each_value_can_be_expected_of_any_number_of_ranks(contract: Contract, ranks: int) -> None:
    for name in contract.values(ranks):
        values = values_of(contract, name, ranks)
        for rank in {0, ranks // 2, ranks - 1}:
            assert as_text(contract.expected(values, rank)), name
        if isinstance(values[0], dict) and isinstance(contract, Splits):
            assert len({len(part) for part in values[0].values()}) == 1


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_each_value_is_made_anew(contract: Contract) -> None:
    """A function that changes it changes nothing of what is expected."""
    for name, make in contract.values(RANKS).items():
        assert as_text(make(1)) == as_text(make(1)), name
        value = make(1)
        if isinstance(value, torch.Tensor) and value.numel():
            value.fill_(True)
            other = make(1)
            other.fill_(False)
            assert as_text(value) != as_text(other), name


def test_the_dtypes_of_a_broadcast() -> None:
    values = Broadcasts(containers=False, dtypes=("bfloat16",)).values(RANKS)
    assert {str(make(0).dtype) for make in values.values()} == {"torch.bfloat16"}


@pytest.mark.parametrize(
    ("padding", "without"),
    [
        (0, set()),
        (-100, {"uint8", "bool"}),
        # 50256 is the padding of GPT-2, which float16 and bfloat16 round.
        (50257, {"uint8", "bool", "float16", "bfloat16"}),
        (float("-inf"), {"int64", "int32", "uint8", "bool"}),
        (0.5, {"int64", "int32", "uint8", "bool"}),
    ],
)
def test_padding_is_asked_of_dtypes_that_have_the_number(padding: float, without: set[str]) -> None:
    all_dtypes = set(Gathers().values(RANKS))
    asked = set(Pads(padding=padding).values(RANKS))
    dtypes = {name for name in all_dtypes if hasattr(torch, name) and isinstance(getattr(torch, name), torch.dtype)}
    assert dtypes - asked == without


def test_an_operation_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="operation 'average': expected sum, mean or max"):
        Reduces("average")  # type: ignore[arg-type]


@dataclasses.dataclass
class Output:
    """As transformers' models return it."""

    loss: Any
    attentions: Any = None


def test_a_value_is_described_by_kind_and_dtype() -> None:
    numpy = pytest.importorskip("numpy")
    values = [
        torch.tensor([1]),
        torch.tensor([1.0]),
        torch.tensor(1),
        numpy.array([1]),
        Output(torch.tensor([1])),
        Output(torch.tensor([2])),
        [1],
        (1,),
        {"x": 1},
        1,
        True,
        "1",
    ]
    texts = {as_text(value) for value in values}
    assert len(texts) == len(values)
    assert as_text({"b": 1, "a": 2}) == as_text(collections.OrderedDict(a=2, b=1))


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.UserDict])
def test_a_mapping_keeps_its_type_on_the_way_to_a_device(kind: Callable[..., Any]) -> None:
    moved = to_device(kind({"x": torch.tensor([1])}), "cpu")
    assert type(moved) is kind
    assert as_text(moved) == "{'x': int64 (1,) [1]}"


def called(exchange: Exchange) -> Any:
    """Return what is recorded of the calls of one exchange in one process."""
    return list(call_all({"share": exchange}, World(0, 1, 0, "cpu")))


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


def test_the_values_are_listed_for_a_wrong_name() -> None:
    with pytest.raises(ValueError, match="share: unsupported has 'tupel'; its values are list, list that divides, "):
        called(Exchange(lambda value: value, Splits(), {"tupel": "it takes lists"}))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_value_that_is_changed(in_place: bool) -> None:
    def shortens(value: Any) -> Any:
        whole = list(value) if isinstance(value, list) else value
        if isinstance(value, list):
            value.append(0)
        return whole

    infos = called(Exchange(shortens, Splits(), in_place=in_place))
    changed = {info.value_name: info.changed for info in infos if info.changed}
    if in_place:
        assert changed == {}
    else:
        assert changed["list of one"] == "['alone', 0]"


def test_what_works_in_place_may_return_nothing_and_is_given_no_leaf() -> None:
    def double(tensor: Any) -> None:
        tensor += tensor
        tensor //= 2

    infos = called(Exchange(double, Reduces("sum", containers=False), in_place=True))
    assert "requires_grad" not in [info.value_name for info in infos]
    for info in infos:
        assert info.got == info.expected
    by_name = {info.value_name: info for info in called(Exchange(double, Reduces("sum", containers=False)))}
    assert by_name["float32"].got == "None"
    assert "leaf Variable that requires grad" in by_name["requires_grad"].error


class Doubles:
    """A contract of a user's own."""

    def values(self, ranks: int) -> Any:
        return {"two": lambda rank: 2 * ranks + rank}

    def expected(self, values: Sequence[Any], rank: int) -> Any:
        return 2 * values[rank]


def test_a_contract_of_ones_own() -> None:
    (info,) = called(Exchange(lambda value: value + value, Doubles()))
    assert (info.got, info.expected) == ("4", "4")
