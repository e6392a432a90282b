"""Check ``coverage`` on hand-made traces: rows given to no rank, to several, in the wrong order, or again after a resume."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

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

COVERAGE = CHECKS.get("coverage")
CELL = Cell("ddp", "fp32")
Batch = tuple[int, ...]
#: The batches of one rank.
Epoch = Sequence[Sequence[int]]


LOADERS: Mapping[str, Loader] = {
    "shuffle": Loader(),
    "in order": Loader(shuffled=False),
    "uneven": Loader(filled=False),
    "drop_last": Loader(filled=False, dropped=True),
}


class Start(NamedTuple):
    """The place at which a run begins: an epoch, and how many of its batches are done."""

    epoch: int
    done: int


class LoaderRun(NamedTuple):
    """A run on so many ranks, which reads each loader from each of these places on."""

    name: str
    ranks: int
    starts: Sequence[Start]


BEGINNING = Start(0, 0)
RUNS = (
    LoaderRun("rows", 2, [BEGINNING]),
    LoaderRun("resumed_rows", 2, [Start(1, 0), Start(1, 2)]),
    LoaderRun("moved_rows", 4, [Start(1, 1)]),
)
#: Loaders that no run moves to more ranks.
UNMOVED = ("uneven", "drop_last")
#: Other epochs of a rank than the right ones, by run, loader and rank.
Change = Mapping[tuple[str, str, int], Sequence[Epoch]]


def batches(order: Sequence[int], rank: int, ranks: int) -> list[Batch]:
    """Return the batches of a rank: two rows each, in turn for each rank."""
    batches_of_all = []
    for start in range(0, len(order), 2):
        batches_of_all.append(tuple(order[start : start + 2]))
    return batches_of_all[rank::ranks]


def order_of(name: str, epoch: int) -> list[int]:
    """Return the rows of an epoch in the order of the batches of all ranks."""
    rows = list(range(23))
    if name != "in order":
        rows = [(7 * row + epoch) % 23 for row in rows]
    if name == "reversed":
        rows.reverse()
    if name == "drop_last":
        return rows[:20]
    if name == "uneven":
        return rows
    return rows + rows[:1]


def epochs(name: str, rank: int, *, ranks: int = 2, start: Start = BEGINNING) -> list[list[Batch]]:
    """Return the right batches of a rank, of both epochs or from a place on."""
    epochs_of_rank = []
    for epoch in range(start.epoch, 2):
        order = order_of(name, epoch)
        epochs_of_rank.append(batches(order, rank, ranks))
    epochs_of_rank[0] = epochs_of_rank[0][start.done :]
    return epochs_of_rank


def frozen(epochs_of_rank: Sequence[Epoch]) -> tuple[tuple[Batch, ...], ...]:
    """Return the epochs as a trace has them: in tuples."""
    return tuple(tuple(map(tuple, epoch)) for epoch in epochs_of_rank)


def snapshot(run: str, rank: int, *infos: RowsInfo) -> Snapshot:
    return Snapshot(rank, run, run, 0, rows=infos)


def run_trace(run: str, snapshots: Sequence[Snapshot]) -> RunTrace:
    return RunTrace(run, len(snapshots), tuple(snapshots))


def trace(change: Change) -> Trace:
    """Runs of all loaders in which nothing is wrong, but (run, loader, rank) with other epochs."""
    runs = []
    for run in RUNS:
        snapshots = [snapshot(run.name, rank, *rows_infos(run, rank, change)) for rank in range(run.ranks)]
        runs.append(run_trace(run.name, snapshots))
    return Trace.of("made", runs)


def rows_infos(run: LoaderRun, rank: int, change: Change) -> Iterator[RowsInfo]:
    """Yield what a rank is given by each loader from each place on."""
    for name, loader in LOADERS.items():
        if run.name == "moved_rows" and name in UNMOVED:
            continue
        for start in run.starts:
            right = epochs(name, rank, ranks=run.ranks, start=start)
            given = change.get((run.name, name, rank), right)
            yield RowsInfo(name, start.epoch, start.done, loader, frozen(given))


def findings(change: Change) -> list[str]:
    """Return the findings about the runs with these other epochs."""
    return COVERAGE.findings(CELL, trace(change))


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
    expected = "uneven: epoch 1: 1 rows are given twice, first 0; expected none"
    assert any(expected in text for text in texts)


def test_a_rank_lacks_a_batch_is_said_once() -> None:
    short = epochs("drop_last", 0)
    short[0].pop()
    assert findings({("rows", "drop_last", 0): short}) == [
        "drop_last: epoch 1: ranks are given 4, 5 batches; expected equally many"
    ]


def test_more_rows_are_dropped_than_fill_no_batch() -> None:
    change = {}
    for rank in (0, 1):
        first, second = epochs("drop_last", rank)
        change["rows", "drop_last", rank] = [first[:-1], second]
    assert findings(change) == ["drop_last: epoch 1: 7 of 23 rows are given to no rank, first 2"]


@pytest.mark.parametrize(
    ("run", "epoch", "done", "length", "texts"),
    [
        ("rows", 0, 0, None, []),
        ("rows", 0, 0, 6, []),
        ("rows", 0, 0, 12, ["epoch 1: rank 0 is given 6 batches; the loader's length is 12"]),
        ("resumed_rows", 1, 2, 4, []),
        (
            "resumed_rows",
            1,
            2,
            6,
            ["resumed in the middle of epoch 2: rank 0 is given 4 batches; the loader's length is 6"],
        ),
    ],
)
def test_a_length_that_is_not_the_number_of_batches(
    run: str, epoch: int, done: int, length: int | None, texts: list[str]
) -> None:
    """Users compute steps and learning rates from it."""
    place = ("in order", epoch, done)
    runs = []
    for sound in trace({}):
        snapshots = []
        for snapshot in sound.snapshots:
            infos = list(snapshot.rows)
            for number, info in enumerate(infos):
                if snapshot.rank == 0 and sound.name == run and (info.loader, info.epoch, info.done) == place:
                    infos[number] = replace(info, lengths=(length,))
            snapshots.append(replace(snapshot, rows=tuple(infos)))
        runs.append(replace(sound, snapshots=tuple(snapshots)))
    assert COVERAGE.findings(CELL, Trace.of("made", runs)) == [f"in order: {text}" for text in texts]


def test_a_rank_has_no_second_epoch_is_said_once() -> None:
    change = {("rows", "in order", 1): epochs("in order", 1)[:1], ("resumed_rows", "in order", 1): []}
    assert findings(change) == ["in order: rank 1 is given rows in 1 of 2 epochs"]


def test_a_rank_has_no_rows_where_nothing_fills_batches() -> None:
    loader = Loader(shuffled=False, filled=False, rows=1)
    assert rows_of(loader, [[0]], []) == []


@pytest.mark.parametrize("silent", ["rows", "resumed_rows", "moved_rows"])
def test_a_silent_rank_is_said_once(silent: str) -> None:
    runs = []
    for run in trace({}):
        snapshots = run.snapshots
        if run.name == silent:
            snapshots = tuple(snapshot for snapshot in snapshots if snapshot.rank != 1)
        runs.append(replace(run, snapshots=snapshots))
    texts = COVERAGE.findings(CELL, Trace.of("made", runs))
    assert texts == [f"rank 1: no report after {silent}"]


def seeds(*orders: str) -> list[str]:
    """Findings about a loader and the same one with another seed, with the rows of these loaders."""
    first_order, second_order = orders
    snapshots = []
    for rank in (0, 1):
        first = frozen(epochs(first_order, rank))
        second = frozen(epochs(second_order, rank))
        seedable = RowsInfo("seedable", 0, 0, Loader(), first)
        reseeded = RowsInfo("data_seed", 0, 0, Loader(reseeded="seedable"), second)
        snapshots.append(snapshot("rows", rank, seedable, reseeded))
    return COVERAGE.findings(CELL, Trace.of("made", [run_trace("rows", snapshots)]))


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
        wrong = first if name == "shuffle" else second[::-1]
        change["rows", name, rank] = [first, wrong]
    assert message in findings(change)


def test_a_resumed_epoch_begins_anew() -> None:
    full_epoch = epochs("shuffle", 1)[1]
    (finding,) = findings({("resumed_rows", "shuffle", 1): [full_epoch]})
    assert finding == (
        "shuffle: resumed in the middle of epoch 2 rank 1 is given rows 15, 22, 20, 4, 2, 9 ...; 2, 9, 7, 14, 12, 19 ... "
        "in the run that never stopped"
    )


def test_more_ranks_go_on_at_another_place() -> None:
    order = order_of("shuffle", 1)
    change = {("moved_rows", "shuffle", rank): [batches(order, rank, 4)] for rank in range(4)}
    (finding,) = findings(change)
    assert finding == (
        "shuffle: at 4 ranks from the middle of epoch 2 on: 8 rows are given up to 3 times, first 1; "
        "expected less than 8, which fill the last batches"
    )


def test_more_ranks_have_nothing_left() -> None:
    """Eight ranks had all rows in two batches, the last of which was filled."""
    order = [row % 23 for row in range(32)]
    loader = Loader(shuffled=False)
    full = []
    for rank in range(8):
        epoch = batches(order, rank, 8)
        full.append(snapshot("rows", rank, RowsInfo("all", 0, 0, loader, frozen([epoch, epoch]))))
    moved = []
    for rank in range(16):
        moved.append(snapshot("moved_rows", rank, RowsInfo("all", 1, 1, loader, ())))
    made = Trace.of("made", [run_trace("rows", full), run_trace("moved_rows", moved)])
    assert COVERAGE.findings(Cell("ddp", "fp32", 8), made) == []


def dropped_by_more_ranks(rows_left: int) -> list[str]:
    """Findings if six ranks drop that many of 23 rows, of which three ranks had the others before."""
    loader = Loader(shuffled=False, filled=False, dropped=True)
    full = []
    for rank in range(3):
        # Three steps of six rows.
        epoch = batches(range(18), rank, 3)
        full.append(snapshot("rows", rank, RowsInfo("all", 0, 0, loader, frozen([epoch, epoch]))))
    done = (23 - rows_left) // 12
    moved = []
    for rank in range(6):
        moved.append(snapshot("moved_rows", rank, RowsInfo("all", 1, done, loader, ())))
    made = Trace.of("made", [run_trace("rows", full), run_trace("moved_rows", moved)])
    return COVERAGE.findings(Cell("ddp", "fp32", 3), made)


def test_more_ranks_drop_what_fills_no_step_of_theirs() -> None:
    # A step of six ranks has twelve rows.
    assert dropped_by_more_ranks(11) == []
    (finding,) = dropped_by_more_ranks(23)
    assert finding == "all: at 6 ranks from the middle of epoch 2 on: 23 of 23 rows are given to no rank, first 0"


def on_mesh(places: Sequence[int], dp_size: int) -> Trace:
    """A run on ranks that are given the rows of these places among the data parallel ranks."""
    snapshots = []
    for rank, place in enumerate(places):
        given = frozen(epochs("shuffle", place, ranks=dp_size))
        info = RowsInfo("shuffle", 0, 0, LOADERS["shuffle"], given)
        snapshots.append(snapshot("rows", rank, info))
    return Trace.of("made", [run_trace("rows", snapshots)])


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
    dp_size = len(set(places))
    assert COVERAGE.findings(Cell.parse(cell), on_mesh(places, dp_size)) == []


@pytest.mark.parametrize(
    ("cell", "finding"),
    [
        ("fsdp2-fp32-w4-tp_2", "they hold parts of the same layers (tp 2)"),
        ("fsdp2-fp32-w4-cp_2", "they hold parts of the same sequences (cp 2)"),
        ("fsdp2-fp32-w4-pp_2", "they hold stages of the same pipeline (pp 2)"),
    ],
)
def test_a_sampler_that_counts_all_ranks_of_a_mesh(cell: str, finding: str) -> None:
    made = on_mesh((0, 1, 2, 3), 4)
    texts = COVERAGE.findings(Cell.parse(cell), made)
    assert texts[0].startswith("shuffle: ranks ")
    assert texts[0].endswith(f"expected the same, as {finding}")
    assert any("rows are given to no rank" in text for text in texts)


def test_data_parallel_ranks_of_a_mesh_that_have_the_same_rows() -> None:
    made = on_mesh((0, 0, 0, 0), 1)
    texts = COVERAGE.findings(Cell.parse("fsdp2-fp32-w4-tp_2"), made)
    expected = "shuffle: epoch 1: 23 rows are given up to 4 times, first 0"
    assert any(text.startswith(expected) for text in texts)


def test_on_a_mesh_loaders_are_not_moved_to_more_ranks() -> None:
    assert names_of_runs("ddp-fp32-w2") == ["rows", "resumed_rows", "moved_rows"]
    assert names_of_runs("fsdp2-fp32-w4-tp_2") == ["rows", "resumed_rows"]


def names_of_runs(cell: str) -> list[str]:
    """Return the runs in which torch's loaders are read in a cell."""
    scenario = coverage(Cell.parse(cell), TorchDriver.loaders.values())
    return [run.name for run in scenario.runs]


def one_row(*batches_by_rank: Epoch) -> list[str]:
    """Findings about a data set of one row, of which each rank is given these batches."""
    return rows_of(Loader(shuffled=False, rows=1), *batches_by_rank)


def rows_of(loader: Loader, *batches_by_rank: Epoch) -> list[str]:
    """Findings about a loader of which each rank is given these batches in both epochs, if there are any."""
    snapshots = []
    for rank, epoch in enumerate(batches_by_rank):
        given: list[Epoch] = []
        if epoch or loader.filled:
            given = [epoch, epoch]
        info = RowsInfo("one row", 0, 0, loader, frozen(given))
        snapshots.append(snapshot("rows", rank, info))
    cell = Cell("ddp", "fp32", len(snapshots))
    return COVERAGE.findings(cell, Trace.of("made", [run_trace("rows", snapshots)]))


def test_fewer_rows_than_ranks() -> None:
    assert one_row([[0]], [[0]]) == []
    assert one_row([[0, 0]], [[0, 0]]) == []
    texts = one_row([[0]], [[]])
    assert "one row: epoch 1: batch 1 of data parallel rank 1 has no rows: a mean over it is no number" in texts
    texts = one_row([], [])
    assert "one row: epoch 1: 1 of 1 rows are given to no rank, first 0" in texts


def test_batches_that_are_given_in_turn_are_filled_together() -> None:
    # Two ranks load a batch of one row each, of which there are three. All are given to one rank.
    epoch = [[0], [1], [2], [0]]
    assert rows_of(Loader(shuffled=False, rows=3, turns=2), epoch) == []
    texts = rows_of(Loader(shuffled=False, rows=3), epoch)
    assert texts[0] == (
        "one row: epoch 1: 1 rows are given twice, first 0; expected less than 1, which fill the last batches"
    )
    texts = rows_of(Loader(shuffled=False, rows=3, turns=2), [*epoch, [1]])
    assert texts[0].endswith("2 rows are given twice, first 0; expected less than 2, which fill the last batches")


def test_each_two_settings_of_loaders_are_together_in_one() -> None:
    settings = ("split_batches", "dispatch_batches", "drop_last", "even_batches", "iterable")
    together = set()
    for loader in _rows._ACCELERATE.values():
        for first, second in itertools.combinations(settings, 2):
            if first in loader and second in loader:
                together.add((first, second))
    assert together == set(itertools.combinations(settings, 2))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 8])
def test_a_batch_that_ranks_split_divides_by_them(ranks: int) -> None:
    arguments = _rows.loader_arguments(_rows.TRAINER_SETTINGS["split_batches"], 23, ranks)
    assert arguments["per_device_train_batch_size"] % ranks == 0


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
        if cell.precision != "bf16_upcast":
            return "no"
        return super().unsupported_reason(cell, device)


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
    actual_reason = COVERAGE.not_applicable(Cell.parse(cell), driver)
    assert reason in (actual_reason or "")
    assert bool(reason) == bool(actual_reason)


def test_trainer_evaluates_without_a_mesh_alone() -> None:
    evaluation = CHECKS.get("evaluation")
    on_a_mesh = evaluation.not_applicable(Cell.parse("fsdp2-fp32-w4-dp_replicate_2"), TrainerDriver)
    without_a_mesh = evaluation.not_applicable(Cell.parse("ddp-fp32-w2"), TrainerDriver)
    assert on_a_mesh is not None
    assert "not computed on this mesh" in on_a_mesh
    assert without_a_mesh is None


def test_a_model_that_transformers_cuts_is_not_resumed() -> None:
    cut = TrainerDriver.loaders_in(Cell.parse("fsdp2-fp32-w4-tp_2-save_only_model"))
    copied = TrainerDriver.loaders_in(Cell.parse("fsdp2-fp32-w4-dp_replicate_2"))
    assert copied == TrainerDriver.loaders
    # Ranks of one model would be given batches of unequal size.
    assert "batch_rebalance" not in cut
    assert "dispatch_batches, dataloader_drop_last" in cut
    assert cut.keys() < copied.keys()
    assert {loader.rows for loader in cut.values()} == {11}
    for loader in cut.values():
        assert not loader.resumes


def test_loaders_are_few_where_all_ranks_read_the_same_few_rows() -> None:
    cell = Cell.parse("fsdp2-fp32-w2-tp_2-save_only_model")
    loaders = TrainerDriver.loaders_in(cell)
    assert 5 < len(loaders) < len(TrainerDriver.loaders)
    assert {loader.rows for loader in loaders.values()} == {7}


def test_under_ulysses_trainer_resumes_between_epochs_alone() -> None:
    loaders = TrainerDriver.loaders_in(Cell.parse("zero2-fp32-w2-cp_2"))
    assert loaders["shuffle"].resumes
    for loader in loaders.values():
        assert not loader.midway
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
    reason = CHECKS.get("evaluation").not_applicable(cell, AccelerateDriver)
    assert reason is not None
    assert "not computed on this mesh" in reason
