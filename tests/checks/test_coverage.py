"""Check ``coverage`` on hand-made traces: rows given to no rank, to several, in the wrong order, or again after a resume."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.drivers.trainer import TrainerDriver
from pytest_distcompat.ext.upstream.drivers import _rows
from pytest_distcompat.scenario import coverage
from pytest_distcompat.trace import Loader, RowsInfo, RunTrace, Snapshot, Trace

CELL = Cell("ddp", "fp32")
Epoch = Sequence[Sequence[int]]


LOADERS: Mapping[str, Loader] = {
    "shuffle": Loader(),
    "in order": Loader(shuffled=False),
    "uneven": Loader(filled=False),
    "drop_last": Loader(filled=False, dropped=True),
}


def batches(order: Sequence[int], rank: int, ranks: int) -> list[tuple[int, ...]]:
    """Two rows a batch, in turn for each rank."""
    every = [tuple(order[n : n + 2]) for n in range(0, len(order), 2)]
    return every[rank::ranks]


def order_of(name: str, epoch: int) -> list[int]:
    """The rows of an epoch in the order of the batches of all ranks."""
    rows = list(range(23))
    if name != "in order":
        rows = [(7 * row + epoch) % 23 for row in rows]
    if name == "reversed":
        rows.reverse()
    if name == "drop_last":
        return rows[:20]
    return rows if name == "uneven" else rows + rows[:1]


def trace(change: Mapping[tuple[str, str, int], Sequence[Epoch]] = {}) -> Trace:
    """Runs of all loaders in which nothing is wrong, but (run, loader, rank) with other epochs."""
    runs = {"rows": (2, [(0, 0)]), "resumed_rows": (2, [(1, 0), (1, 2)]), "moved_rows": (4, [(1, 1)])}
    made = []
    for run, (ranks, starts) in runs.items():
        snapshots = []
        for rank in range(ranks):
            infos = []
            for name in LOADERS:
                if run == "moved_rows" and name in {"uneven", "drop_last"}:
                    continue
                for epoch, done in starts:
                    epochs_of_rank = [batches(order_of(name, number), rank, ranks) for number in range(epoch, 2)]
                    epochs_of_rank[0] = epochs_of_rank[0][done:]
                    given = tuple(tuple(map(tuple, epoch)) for epoch in change.get((run, name, rank), epochs_of_rank))
                    infos.append(RowsInfo(name, epoch, done, LOADERS[name], given))
            snapshots.append(Snapshot(rank, run, run, 0, rows=tuple(infos)))
        made.append(RunTrace(run, ranks, tuple(snapshots)))
    return Trace.of("made", made)


def findings(change: Mapping[tuple[str, str, int], Sequence[Epoch]]) -> list[str]:
    """Of the check."""
    return CHECKS.get("coverage").findings(CELL, trace(change))


def epochs(name: str, rank: int) -> list[list[tuple[int, ...]]]:
    """What is right."""
    return [batches(order_of(name, epoch), rank, 2) for epoch in (0, 1)]


def test_all_rows_once() -> None:
    assert findings({}) == []


def test_both_ranks_are_given_the_same_rows() -> None:
    texts = findings({("rows", "in order", 1): epochs("in order", 0)})
    assert "in order: epoch 1: 11 of 23 rows are given to no rank, first 2" in texts
    assert (
        "in order: epoch 1: 12 rows are given twice, first 0; expected less than 4, which fill the last batches"
        in texts
    )


def test_a_row_again_that_no_batch_needs() -> None:
    wrong = epochs("uneven", 1)
    wrong[0][0] = (*wrong[0][0][:1], 0)
    texts = findings({("rows", "uneven", 1): wrong})
    assert any("uneven: epoch 1: 1 rows are given twice, first 0; expected none" in text for text in texts)


def test_a_rank_lacks_a_batch_is_said_once() -> None:
    short = epochs("drop_last", 0)
    short[0].pop()
    assert findings({("rows", "drop_last", 0): short}) == [
        "drop_last: epoch 1: ranks are given 4, 5 batches; expected equally many"
    ]


def test_more_rows_are_dropped_than_fill_no_batch() -> None:
    short = {
        ("rows", "drop_last", rank): [epochs("drop_last", rank)[0][:-1], epochs("drop_last", rank)[1]]
        for rank in (0, 1)
    }
    assert findings(short) == ["drop_last: epoch 1: 7 of 23 rows are given to no rank, first 2"]


def test_a_rank_has_no_second_epoch_is_said_once() -> None:
    change = {("rows", "in order", 1): epochs("in order", 1)[:1], ("resumed_rows", "in order", 1): []}
    assert findings(change) == ["in order: rank 1 is given rows in 1 of 2 epochs"]


def test_a_rank_has_no_rows_where_nothing_fills_batches() -> None:
    loader = Loader(shuffled=False, filled=False, rows=1)
    assert rows_of(loader, [[0]], []) == []


@pytest.mark.parametrize("silent", ["rows", "resumed_rows", "moved_rows"])
def test_a_silent_rank_is_said_once(silent: str) -> None:
    runs = []
    for run in trace():
        snapshots = tuple(made for made in run.snapshots if run.name != silent or made.rank != 1)
        runs.append(RunTrace(run.name, run.world_size, snapshots))
    assert CHECKS.get("coverage").findings(CELL, Trace.of("made", runs)) == [f"rank 1: no report after {silent}"]


def seeds(*orders: str) -> list[str]:
    """Findings about a loader and the same one with another seed, with the rows of these loaders."""
    loaders = {"seedable": Loader(), "data_seed": Loader(reseeded="seedable")}
    snapshots = []
    for rank in (0, 1):
        infos = []
        for (name, loader), order in zip(loaders.items(), orders, strict=True):
            given = tuple(tuple(batches(order_of(order, epoch), rank, 2)) for epoch in (0, 1))
            infos.append(RowsInfo(name, 0, 0, loader, given))
        snapshots.append(Snapshot(rank, "rows", "rows", 0, rows=tuple(infos)))
    return CHECKS.get("coverage").findings(CELL, Trace.of("made", [RunTrace("rows", 2, tuple(snapshots))]))


def test_another_seed_gives_another_order() -> None:
    assert seeds("shuffle", "reversed") == []
    assert seeds("shuffle", "shuffle") == [
        "data_seed: its order is that of seedable; expected another one, as the seed is another"
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shuffle", "shuffle: epoch 2 has the order of epoch 1; expected another one"),
        ("in order", "in order: epoch 2 has another order than epoch 1; expected the order of the data"),
    ],
)
def test_the_order_of_the_second_epoch(name: str, message: str) -> None:
    change = {}
    for rank in (0, 1):
        first, second = epochs(name, rank)
        change["rows", name, rank] = [first, first] if name == "shuffle" else [first, second[::-1]]
    assert message in findings(change)


def test_a_resumed_epoch_begins_anew() -> None:
    full_epoch = epochs("shuffle", 1)[1]
    assert findings({("resumed_rows", "shuffle", 1): [full_epoch]}) == [
        (
            "shuffle: resumed in the middle of epoch 2 rank 1 is given rows 15, 22, 20, 4, 2, 9 ...; 2, 9, 7, 14, 12, 19 ... "
            "in the run that never stopped"
        )
    ]


def test_more_ranks_go_on_at_another_place() -> None:
    change = {("moved_rows", "shuffle", rank): [batches(order_of("shuffle", 1), rank, 4)] for rank in range(4)}
    assert findings(change) == [
        (
            "shuffle: at 4 ranks from the middle of epoch 2 on: 8 rows are given up to 3 times, first 1; "
            "expected less than 8, which fill the last batches"
        )
    ]


def test_more_ranks_have_nothing_left() -> None:
    """Eight ranks had all rows in two batches, the last of which was filled."""
    rows = [row % 23 for row in range(32)]
    epochs_of = [((*batches(rows, rank, 8),),) * 2 for rank in range(8)]
    loader = Loader(shuffled=False)
    runs = [
        ("rows", [RowsInfo("all", 0, 0, loader, rows) for rows in epochs_of]),
        ("moved_rows", [RowsInfo("all", 1, 1, loader, ()) for _ in range(16)]),
    ]
    made = [
        RunTrace(run, len(infos), tuple(Snapshot(rank, run, run, 0, rows=(info,)) for rank, info in enumerate(infos)))
        for run, infos in runs
    ]
    assert CHECKS.get("coverage").findings(Cell("ddp", "fp32", 8), Trace.of("made", made)) == []


def on_mesh(places: Sequence[int], dp_size: int) -> Trace:
    """A run on ranks that are given the rows of these places among the data parallel ranks."""
    snapshots = []
    for rank, place in enumerate(places):
        given = tuple(tuple(batches(order_of("shuffle", epoch), place, dp_size)) for epoch in (0, 1))
        rows = (RowsInfo("shuffle", 0, 0, LOADERS["shuffle"], given),)
        snapshots.append(Snapshot(rank, "rows", "rows", 0, rows=rows))
    return Trace.of("made", [RunTrace("rows", len(places), tuple(snapshots))])


@pytest.mark.parametrize(
    ("cell", "places"),
    [
        ("fsdp2-fp32-w4-tp_2", (0, 0, 1, 1)),
        ("fsdp2-fp32-w4-cp_2", (0, 0, 1, 1)),
        ("fsdp2-fp32-w4-pp_2", (0, 1, 0, 1)),
        ("fsdp2-fp32-w2-pp_2", (0, 0)),
        ("fsdp2-fp32-w4-model_moe_fused-ep_2", (0, 1, 2, 3)),
        ("fsdp2-fp32-w4-dp_replicate_2", (0, 1, 2, 3)),
    ],
)
def test_ranks_that_share_rows_on_a_mesh_count_once(cell: str, places: Sequence[int]) -> None:
    made = on_mesh(places, len(set(places)))
    assert CHECKS.get("coverage").findings(Cell.parse(cell), made) == []


@pytest.mark.parametrize(
    ("cell", "finding"),
    [
        ("fsdp2-fp32-w4-tp_2", "they hold parts of the same layers (tp 2)"),
        ("fsdp2-fp32-w4-cp_2", "they hold parts of the same sequences (cp 2)"),
        ("fsdp2-fp32-w4-pp_2", "they hold stages of the same pipeline (pp 2)"),
    ],
)
def test_a_sampler_that_counts_all_ranks_of_a_mesh(cell: str, finding: str) -> None:
    texts = CHECKS.get("coverage").findings(Cell.parse(cell), on_mesh((0, 1, 2, 3), 4))
    assert texts[0].startswith("shuffle: ranks ")
    assert texts[0].endswith(f"expected the same, as {finding}")
    assert any("rows are given to no rank" in text for text in texts)


def test_data_parallel_ranks_of_a_mesh_that_have_the_same_rows() -> None:
    texts = CHECKS.get("coverage").findings(Cell.parse("fsdp2-fp32-w4-tp_2"), on_mesh((0, 0, 0, 0), 1))
    assert any(text.startswith("shuffle: epoch 1: 23 rows are given up to 4 times, first 0") for text in texts)


def test_on_a_mesh_loaders_are_not_moved_to_more_ranks() -> None:
    loaders = TorchDriver.loaders.values()
    assert [run.name for run in coverage(Cell.parse("ddp-fp32-w2"), loaders).runs] == [
        "rows",
        "resumed_rows",
        "moved_rows",
    ]
    assert [run.name for run in coverage(Cell.parse("fsdp2-fp32-w4-tp_2"), loaders).runs] == ["rows", "resumed_rows"]


def one_row(*batches_by_rank: Epoch) -> list[str]:
    """Findings about a data set of one row, of which each rank is given these batches."""
    return rows_of(Loader(shuffled=False, rows=1), *batches_by_rank)


def rows_of(loader: Loader, *batches_by_rank: Epoch) -> list[str]:
    """Findings about a loader of which each rank is given these batches in both epochs, if there are any."""
    snapshots = []
    for rank, given in enumerate(batches_by_rank):
        epoch = tuple(tuple(batch) for batch in given)
        both = (epoch, epoch) if epoch or loader.filled else ()
        rows = (RowsInfo("one row", 0, 0, loader, both),)
        snapshots.append(Snapshot(rank, "rows", "rows", 0, rows=rows))
    made = Trace.of("made", [RunTrace("rows", len(snapshots), tuple(snapshots))])
    return CHECKS.get("coverage").findings(Cell("ddp", "fp32", len(snapshots)), made)


def test_fewer_rows_than_ranks() -> None:
    assert one_row([[0]], [[0]]) == []
    assert one_row([[0, 0]], [[0, 0]]) == []
    assert "one row: epoch 1: batch 1 of data parallel rank 1 has no rows: a mean over it is no number" in one_row(
        [[0]], [[]]
    )
    assert "one row: epoch 1: 1 of 1 rows are given to no rank, first 0" in one_row([], [])


def test_each_two_settings_of_loaders_are_together_in_one() -> None:
    settings = ("split_batches", "dispatch_batches", "drop_last", "even_batches", "iterable")
    together = set()
    for loader in _rows._ACCELERATE.values():
        for first, second in itertools.combinations(settings, 2):
            if first in loader and second in loader:
                together.add((first, second))
    assert together == set(itertools.combinations(settings, 2))


def test_of_loaders_that_save_their_position_one_is_evaluated_whatever_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {f"torchdata {number}": loader for number, loader in enumerate(_rows._STATEFUL.values())}
    monkeypatch.setattr(_rows, "_ACCELERATE", settings)
    loaders = {name: _rows._expected(name) for name in settings}
    assert _rows.evaluated_loaders(loaders) == ["torchdata 0"]


class OnlyBfloat16(TorchDriver):
    """A trainer that has no float32."""

    @classmethod
    def unsupported_reason(cls, cell: Cell, device: str = "cpu") -> str | None:
        return "no" if cell.precision != "bf16_upcast" else super().unsupported_reason(cell, device)


@pytest.mark.parametrize(
    ("cell", "driver", "reason"),
    [
        ("ddp-bf16_upcast-w2", OnlyBfloat16, ""),
        ("fsdp2-bf16_upcast-w2", OnlyBfloat16, "is tested in ddp-bf16_upcast"),
        ("ddp-fp32-w2", Driver, "declares no loaders"),
        ("fsdp2-fp32-w2", TorchDriver, "is tested in ddp-fp32"),
        ("ddp-bf16_upcast-w2", TorchDriver, "is tested in ddp-fp32"),
        ("ddp-fp32-w2-model_mlp", TorchDriver, "is tested in ddp-fp32"),
        ("ddp-fp32-w2", TorchDriver, ""),
        ("fsdp2-fp32-w4-tp_2", TorchDriver, ""),
        ("fsdp2-bf16_upcast-w4-model_mlp-dp_replicate_2", TorchDriver, ""),
        ("fsdp2-fp32-w2-model_moe_fused-ep_2", TorchDriver, ""),
        ("fsdp2-fp16_mixed-w4-tp_2", TorchDriver, "where it is tested"),
        ("fsdp2-fp32-w4-activation_checkpointing-tp_2", TorchDriver, "as they are without activation_checkpointing"),
        ("zero2-fp32-w4-cp_2", AccelerateDriver, ""),
        ("zero1-fp32-w4-tp_2", AccelerateDriver, "not made for this mesh"),
        ("zero2-fp32-w2-cp_2", TrainerDriver, ""),
        ("fsdp2-fp32-w4-dp_replicate_2", TrainerDriver, ""),
        ("fsdp2-fp32-w4-tp_2-save_only_model", TrainerDriver, ""),
        ("fsdp2-fp32-w4-model_hf:gpt_oss-ep_2-save_only_model", TrainerDriver, ""),
        ("fsdp2-fp32-w2-tp_2-save_only_model", TrainerDriver, ""),
        ("fsdp2-fp32-w2-model_hf:gpt_oss-ep_2-save_only_model", TrainerDriver, ""),
        ("fsdp2-fp32-w4-model_mlp-dp_replicate_2", TrainerDriver, "not made for this mesh"),
    ],
)
def test_cells_to_which_it_does_not_apply(cell: str, driver: type[Driver], reason: str) -> None:
    actual_reason = CHECKS.get("coverage").not_applicable(Cell.parse(cell), driver)
    assert reason in (actual_reason or "")
    assert bool(reason) == bool(actual_reason)


def test_trainer_evaluates_without_a_mesh_alone() -> None:
    reason = CHECKS.get("evaluation").not_applicable
    assert "not computed on this mesh" in (reason(Cell.parse("fsdp2-fp32-w4-dp_replicate_2"), TrainerDriver) or "")
    assert reason(Cell.parse("ddp-fp32-w2"), TrainerDriver) is None


def test_a_model_that_transformers_cuts_is_not_resumed() -> None:
    cut = TrainerDriver.loaders_in(Cell.parse("fsdp2-fp32-w4-tp_2-save_only_model"))
    copied = TrainerDriver.loaders_in(Cell.parse("fsdp2-fp32-w4-dp_replicate_2"))
    assert copied == TrainerDriver.loaders
    # Ranks of one model would be given batches of unequal size.
    assert copied.keys() - cut.keys() == {"batch_rebalance"}
    for loader in cut.values():
        assert not loader.resumes


def test_loaders_are_few_where_all_ranks_read_the_same_few_rows() -> None:
    loaders = TrainerDriver.loaders_in(Cell.parse("fsdp2-fp32-w2-tp_2-save_only_model"))
    assert 5 < len(loaders) < len(TrainerDriver.loaders)
    assert {loader.rows for loader in loaders.values()} == {7}


def test_under_ulysses_trainer_resumes_between_epochs_alone() -> None:
    loaders = TrainerDriver.loaders_in(Cell.parse("zero2-fp32-w2-cp_2"))
    assert loaders["shuffle"].resumes
    assert not any(loader.midway for loader in loaders.values())
    assert not loaders["iterable"].resumes
    assert not loaders.keys() & {"split_batches", "get_eval_dataloader", "batch_rebalance"}


def test_accelerate_has_loaders_of_equal_batches_under_ulysses() -> None:
    cell = Cell.parse("zero2-fp32-w2-cp_2")
    loaders = AccelerateDriver.loaders_in(cell)
    assert {"shuffle", "dispatch_batches", "split_batches", "iterable"} <= loaders.keys()
    for loader in loaders.values():
        assert loader.filled
        assert not loader.dropped
        assert not loader.resumes
    assert "not computed on this mesh" in (CHECKS.get("evaluation").not_applicable(cell, AccelerateDriver) or "")
