"""Cells have one id each, and a matrix says which there are."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pytest_distcompat.cell import FACETS, OPTIONS, Cell, Matrix

NAMES = ", ".join(map(repr, OPTIONS["model"].values))


@pytest.mark.parametrize(
    ("cell", "cell_id"),
    [
        (Cell("ddp", "fp32"), "ddp-fp32-w2"),
        (Cell.of("fsdp2", "bf16_upcast", compile=True), "fsdp2-bf16_upcast-w2-compile"),
        (Cell.of("zero3", "fp32", 4, model="mlp"), "zero3-fp32-w4-model_mlp"),
        (Cell("fsdp2", "fp32", 4, (("compile", True),), nodes=2), "fsdp2-fp32-w4-n2-compile"),
        # In the order of OPTIONS, whatever the order given.
        (
            Cell.of("fsdp1", "fp32", 2, cpu_offload=True, state_dict="full", model="llama_tied"),
            "fsdp1-fp32-w2-model_llama_tied-state_dict_full-cpu_offload",
        ),
    ],
)
def test_an_id_reads_aloud_and_back(cell: Cell, cell_id: str) -> None:
    assert cell.id == str(cell) == cell_id
    assert Cell.parse(cell_id) == cell


def test_options_at_their_default_are_not_in_the_id() -> None:
    cell = Cell.of("ddp", "fp32", model="llama", compile=False)
    assert cell == Cell("ddp", "fp32")
    assert hash(cell) == hash(Cell("ddp", "fp32"))
    assert Cell.parse("ddp-fp32-w2-model_llama-no_compile") == cell
    assert cell.option("model") == "llama"
    assert cell.option("compile") is False


@pytest.mark.parametrize("name", OPTIONS)
def test_every_value_of_every_option_has_a_token_of_its_own(name: str) -> None:
    option = OPTIONS[name]
    for value in option.values:
        cell = Cell("ddp", "fp32", 4, ((name, value),))
        assert Cell.parse(cell.id) == cell
        assert cell.option(name) == value
    tokens = {option.token(value) for value in option.values}
    assert len(tokens) == len(option.values)


def test_facets_are_strategy_precision_world_size_and_options() -> None:
    facets = Cell.of("ddp", "fp32", 4, compile=True).facets()
    assert tuple(facets) == FACETS
    assert facets["strategy"] == "ddp"
    assert facets["precision"] == "fp32"
    assert facets["world_size"] == 4
    assert facets["compile"] is True
    assert facets["model"] == "llama"


@pytest.mark.parametrize(
    ("cell_id", "message"),
    [
        ("fsdp2", "'fsdp2' is no cell id; one reads like 'fsdp2-bf16_upcast-w2-compile'"),
        ("fsdp2-fp32", "'fsdp2-fp32' is no cell id"),
        ("fsdp2-fp32-2", "'fsdp2-fp32-2' is no cell id"),
        ("fsdp2-fp32-wx", "'fsdp2-fp32-wx' is no cell id"),
        ("fsdp2-fp32-w0", "world_size is 0; expected a whole number from 1 to 1000000"),
        ("fsdp2-fp32-w2-n0", "nodes is 0; expected a whole number from 1 to 1000000"),
        (
            "fsdp2-fp32-w2-fast",
            "cell id 'fsdp2-fp32-w2-fast': unknown part 'fast'. Known: model_llama, model_llama_tied, model_mlp,",
        ),
        ("-fp32-w2", "'-fp32-w2' is no cell id"),
        ("fsdp2-fp32-w²", "'fsdp2-fp32-w²' is no cell id"),
    ],
)
def test_an_invalid_cell_id_is_an_error(cell_id: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is what is tested
        Cell.parse(cell_id)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"zap": True},
            "no option named 'zap'. Known: " + ", ".join(OPTIONS),
        ),
        (
            {"model": "gpt"},
            "option 'model' has no value 'gpt'. Known: " + NAMES,
        ),
        (
            {"compile": "yes"},
            "option 'compile' has no value 'yes'. Known: False, True, 'aot_eager', 'regional', 'partial'",
        ),
    ],
)
def test_a_wrong_option_lists_the_right_ones(options: dict[str, Any], message: str) -> None:
    for make in (lambda: Cell.of("ddp", "fp32", 2, **options), lambda: Matrix(options=(options,))):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is what is tested
            make()
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("world_size", "tp", "message"),
    [
        (2, 4, "tp 4 does not divide 2 ranks; with these tp can be 1, 2"),
        (6, 4, "tp 4 does not divide 6 ranks; with these tp can be 1, 2"),
        (3, 2, "tp 2 does not divide 3 ranks; with these tp can be 1"),
    ],
)
def test_a_mesh_that_does_not_multiply_lists_what_does(world_size: int, tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Cell.of("fsdp2", "fp32", world_size, tp=tp)


def test_peers_of_tensor_parallelism_are_neighbours_and_share_a_batch() -> None:
    cell = Cell.of("fsdp2", "fp32", 8, tp=2, dp_replicate=2)
    assert cell.tp == 2
    assert cell.dp_size == 4
    dp_ranks = [cell.dp_rank(rank) for rank in range(8)]
    assert dp_ranks == [0, 0, 1, 1, 2, 2, 3, 3]
    assert Cell("ddp", "fp32", 3).dp_size == 3


def test_parts_of_a_sequence_are_beside_those_of_a_layer() -> None:
    cell = Cell.of("fsdp2", "fp32", 8, tp=2, cp=2)
    assert cell.cp == 2
    assert cell.dp_size == 2
    dp_ranks = [cell.dp_rank(rank) for rank in range(8)]
    assert dp_ranks == [0, 0, 0, 0, 1, 1, 1, 1]
    assert cell.tp_peers(1) == (0, 1)
    assert cell.tp_peers(6) == (6, 7)
    assert cell.cp_peers(0) == (0, 2)
    assert cell.cp_peers(1) == (1, 3)
    assert cell.cp_peers(2) == (0, 2)
    assert cell.cp_peers(7) == (5, 7)
    message = r"^cp 4 does not divide 2 ranks, those of each part of tp; with these cp can be 1, 2$"
    with pytest.raises(ValueError, match=message):
        Cell.of("fsdp2", "fp32", 4, tp=2, cp=4)


def test_experts_are_spread_over_data_parallel_ranks() -> None:
    cell = Cell.of("fsdp2", "fp32", 8, ep=4)
    assert cell.ep == 4
    assert cell.dp_size == 8
    words = "ep 4 does not divide 2 data parallel ranks; with these ep can be 1, 2"
    with pytest.raises(ValueError, match=f"^{words}$"):
        Cell.of("fsdp2", "fp32", 4, tp=2, ep=4)


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^no option named 'zap'. Known: model, "):
        Cell("ddp", "fp32").option("zap")


def test_equal_cells_have_one_id() -> None:
    cell: Any = 1
    expected = Cell.of("ddp", "fp32", compile=True)
    assert Cell.of("ddp", "fp32", compile=cell).id == expected.id


def ids(matrix: Matrix) -> list[str]:
    """The cells where the run knows two strategies and one precision, at world size 2."""
    return [cell.id for cell in matrix.cells(("ddp", "fsdp2"), ("fp32",), 2)]


@pytest.mark.parametrize(
    ("matrix", "cells"),
    [
        (Matrix(), ["ddp-fp32-w2", "fsdp2-fp32-w2"]),
        (Matrix(strategies=("zero1",)), ["zero1-fp32-w2"]),
        (Matrix(strategies=("ddp",), precisions=("bf16_pure", "fp32")), ["ddp-bf16_pure-w2", "ddp-fp32-w2"]),
        (Matrix(strategies=("ddp",), world_sizes=(4, 1)), ["ddp-fp32-w4", "ddp-fp32-w1"]),
        (
            Matrix(options=({}, {"compile": True})),
            ["ddp-fp32-w2", "ddp-fp32-w2-compile", "fsdp2-fp32-w2", "fsdp2-fp32-w2-compile"],
        ),
        # Beside the product, once each.
        (
            Matrix(strategies=("ddp",), extra=(Cell("zero3", "fp32", 4), Cell("ddp", "fp32"))),
            ["ddp-fp32-w2", "zero3-fp32-w4"],
        ),
        (
            Matrix(("ddp",), world_sizes=(4,), nodes=2, extra=(Matrix(("fsdp2",), nodes=1), Cell("zero1", "fp32"))),
            ["ddp-fp32-w4-n2", "fsdp2-fp32-w2", "zero1-fp32-w2-n2"],
        ),
        # Two ways to say one cell.
        (Matrix(strategies=("ddp",), options=({}, {"model": "llama"})), ["ddp-fp32-w2"]),
    ],
)
def test_the_cells_of_a_matrix(matrix: Matrix, cells: list[str]) -> None:
    assert ids(matrix) == cells


def test_a_matrix_takes_any_iterable_but_keeps_tuples() -> None:
    wanted: Any = ["ddp"]
    assert Matrix(strategies=wanted) == Matrix(strategies=("ddp",))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strategies", "ddp"),
        ("precisions", "fp32"),
        ("world_sizes", 2),
        ("options", {"compile": True}),
        ("options", {}),
    ],
)
def test_a_value_that_is_no_tuple_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        Matrix(**{name: value})
    assert str(caught.value) == f"Matrix({name}=...) takes a tuple, got {value!r}"


@pytest.mark.parametrize("nodes", [0, "2", True])
def test_nodes_that_are_no_number_are_refused(nodes: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Matrix(nodes=...) is {nodes!r}; expected a whole number")):
        Matrix(nodes=nodes)


def test_ranks_that_nodes_do_not_divide() -> None:
    assert Cell("ddp", "fp32", 4, nodes=2).spread.uneven is None
    assert Cell("ddp", "fp32", 3, nodes=2).spread.uneven == "3 ranks cannot be spread evenly over 2 nodes"
    assert Cell("ddp", "fp32", 1, nodes=2).spread.uneven == "1 rank cannot be spread evenly over 2 nodes"


def test_a_matrix_beside_the_product_takes_the_runs_world_size_too() -> None:
    beside = Matrix(("fsdp2",), ("bf16_upcast",), options=({"model": "mlp"},))
    extra = (beside, Cell("ddp", "fp32", 4), Cell("zero1", "fp32", 2))
    matrix = Matrix(("ddp",), ("fp32",), extra=extra)
    ids = [cell.id for cell in matrix.cells((), (), 4)]
    assert ids == ["ddp-fp32-w4", "fsdp2-bf16_upcast-w4-model_mlp", "zero1-fp32-w2"]


@pytest.mark.parametrize("world_size", [2.0, "2", True, 0, None, 10**9])
def test_a_world_size_of_a_matrix_that_is_no_number_of_ranks(world_size: Any) -> None:
    """2.0 was taken, and each item failed with a traceback."""
    message = f"Matrix(world_sizes=...) is {world_size!r}; expected a whole number from 1 to 1000000"
    with pytest.raises(ValueError, match=re.escape(message)):
        Matrix(("ddp",), ("fp32",), world_sizes=(world_size,))
