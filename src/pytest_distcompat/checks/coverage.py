"""Checks ``coverage`` (rows of data loaders) and ``evaluation`` (metrics over several ranks).

- ``coverage``: each loader of the trainer gives each row to one rank, once an epoch.
- ``evaluation``: a metric that is computed on several ranks equals that of one process.

``judge.judge`` calls a check once all its runs have ended. The check gets a cell and a trace. A
cell is one point of the test matrix: ``ddp-fp32-w2`` is strategy ``ddp``, precision ``fp32`` and
2 ranks. A trace has the runs of that cell; a run is one process group from start to end. For each
run the trace has snapshots: what one rank recorded after one action. Here the actions are ``rows``
(the rank read its loaders) and ``metrics`` (it evaluated). The check yields findings, sentences
such as ``shuffled: epoch 1: 2 of 23 rows are given to no rank, first 3``; none if all is right.

The data set has 23 rows with the numbers 0 to 22, which neither 2 nor 4 ranks divide. Three runs
read it:

- ``rows`` reads two epochs from the beginning.
- ``resumed_rows`` is a new process group that resumes the loaders twice: at the start of epoch 2
  and after two batches of it.
- ``moved_rows`` has twice as many ranks and resumes after one batch of epoch 2, which is as far.

A driver says by a ``Loader`` what is expected of each of its loaders: that the order changes
(``shuffled``), that the last batches are filled with rows from the beginning (``filled``) or rows
that fill no batch are left out (``dropped``), and which other loader it is with another seed
(``reseeded``). Each record of rows, a ``RowsInfo``, has it as ``expected``. The record also has the
``epoch`` with which the loader began, and how many batches of that were ``done`` before.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell of a driver (the class by which a trainer is
tested) does not have the check, or None; ``depends_on`` has the facets of a cell (precision,
options, ...) on which the outcome depends, so that of cells with equal facets the default profile
tests only one; ``costly`` says that it needs several runs of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.checks.data import shared_by
from pytest_distcompat.driver import Driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import EVALUATION, MESH, ROWS, Scenario
from pytest_distcompat.scenario import coverage as runs_of_loaders
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import Loader, RowsInfo, RunTrace, Trace
from pytest_distcompat.wording import and_others

#: The batches of one epoch that one rank is given, in order. Each batch is a tuple of row numbers:
#: ``((4, 17), (0, 9))`` are two batches of two rows.
Batches = Sequence[Sequence[int]]
#: What one loader gave in one run: rank -> one record for each time that the loader was started.
#: There is one record in ``rows`` and ``moved_rows``, and there are two in ``resumed_rows``.
RowsByRank = Mapping[int, Sequence[RowsInfo]]
#: The facets of a cell (strategy, precision, world size, options) on which the outcome depends,
#: beside the strategy. Of cells that are equal in them the default profile tests only one. A mesh
#: arranges ranks in a grid, by the options ``tp`` (tensor parallel), ``cp`` (context parallel),
#: ``pp`` (pipeline) and others.
DATA_PLACE = frozenset({"world_size", *MESH}) - {"pp_schedule"}


def tested_once(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the loaders are tested in another cell; None if they are tested in this one.

    Loaders depend on neither strategy nor precision. So, of all cells without a mesh, only the
    first one that the driver supports tests them, such as ``ddp-fp32-w2``.
    """
    if any(name in MESH for name, _ in cell.options):
        return _not_on_mesh(cell, driver)
    return in_first_cell(cell, driver, "data are loaded")


def in_first_cell(cell: Cell, driver: type[Driver], what_happens: str) -> str | None:
    """Return why something is tested in another cell; None if the cell is the first.

    Args:
        cell: The cell.
        driver: The driver.
        what_happens: What is alike in all cells: ``data are loaded``.
    """
    first = _first_cell(cell, driver)
    if cell == first:
        return None
    tested_in = f"{first.strategy}-{first.precision}"
    return f"{what_happens} alike in all cells, and that is tested in {tested_in}"


def _not_on_mesh(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the loaders of a cell on a mesh are tested in another cell on that mesh.

    None if they are tested in this cell.
    """
    if cell.precision not in {"fp32", "bf16_upcast"}:
        return (
            f"data are loaded on a mesh in {cell.precision} as in fp32 and bf16_upcast, "
            "where it is tested"
        )
    # An option that the driver needs for a mesh does not make the cell another one: if ``ep`` needs
    # ``model=moe``, no cell with ``ep`` would be left otherwise.
    allowed = {"model", *MESH}
    for key, needed in driver.needs_options.items():
        # A key is an option, several options together (``tp+ep``), or an option with its value
        # (``optimizer_muon``).
        if allowed.issuperset(key.split("+")):
            allowed.update(needed)
    for name, _ in cell.options:
        if name not in allowed:
            return f"data are loaded on a mesh as they are without {name}, where it is tested"
    if not driver.loaders_in(cell):
        return "the driver's loaders are not made for this mesh"
    return None


def _first_cell(cell: Cell, driver: type[Driver]) -> Cell:
    """Return the first cell without options that the driver supports, with the cell's ranks.

    If the driver supports no such cell, it is the given cell itself, which then tests the loaders.
    """
    for precision in PRECISIONS.names():
        for strategy in STRATEGIES.names():
            # On as many ranks as the given cell has, over as many machines.
            plain = Cell(strategy, precision, cell.world_size).spread_as(cell)
            if not driver.unsupported_reason(plain):
                return plain
    return cell


def _has_loaders(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why ``coverage`` does not apply to a cell; None if it does."""
    if not driver.loaders:
        return "the driver declares no loaders, whose rows() gives the rows"
    return tested_once(cell, driver)


def _runs_to_read(cell: Cell, driver: type[Driver]) -> Scenario:
    """Return the runs that read the driver's loaders; those that resume only if a loader can."""
    loaders = driver.loaders_in(cell)
    return runs_of_loaders(cell, loaders.values())


@check(
    scenario=_runs_to_read,
    until=(
        ("rows", "rows", 0),
        ("resumed_rows", "resumed_rows", 0),
        ("moved_rows", "moved_rows", 0),
    ),
    order=9,
    not_applicable=_has_loaders,
    costly=True,
    depends_on=DATA_PLACE,
)
def coverage(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that each loader gives every row to one rank in each epoch, also when resumed.

    The rows do not divide by the ranks, so some may be given twice to fill the last batches. A
    shuffled loader has another order in each epoch, and with another seed. Resumed between epochs,
    or in the middle of the second, it goes on with the next rows; at another world size, twice as
    many ranks share those left. On a mesh ranks that hold parts of the same layers (``tp``), the
    same sequences (``cp``) or stages of one pipeline (``pp``) are given the same rows, and count
    once. The loader's length, if the driver tells it, is the number of batches that it gives.

    If it fails: with rows on several ranks nothing shards the data; with rows on none two samplers
    do (``DistributedSampler`` and the trainer's). With the same order in each epoch ``set_epoch``
    is not called. A resumed run needs the epoch's seed and the number of batches done.
    """
    silent = _silent_ranks(trace.run("rows"))
    if silent:
        # Whatever the others were not given follows from it.
        yield from silent
        return
    full_run = _rows_by_loader(trace.runs.get("rows"))
    resumed_run = trace.runs.get("resumed_rows")
    yield from _silent_ranks(resumed_run)
    resumed_rows = _rows_by_loader(resumed_run)
    resharded_run = trace.runs.get("moved_rows")
    silent = _silent_ranks(resharded_run)
    yield from silent
    resharded_rows: Mapping[str, RowsByRank] = {}
    if not silent:
        resharded_rows = _rows_by_loader(resharded_run)
    for name, rows_by_rank in full_run.items():
        findings = list(_without_an_epoch(rows_by_rank))
        if not findings:
            findings += _unlike_peers(cell, rows_by_rank)
            full_rows = _once_for_peers(cell, rows_by_rank)
            findings += _other_epochs(full_rows)
            findings += _same_with_another_seed(rows_by_rank, full_run)
            findings += _not_continued(rows_by_rank, resumed_rows.get(name, {}))
            if name in resharded_rows:
                findings += _not_continued_resharded(full_rows, resharded_rows[name])
        if not findings:
            # Of a loader that gives other rows than expected the length says nothing more.
            findings += _other_lengths(rows_by_rank)
            findings += _other_lengths(resumed_rows.get(name, {}))
            findings += _other_lengths(resharded_rows.get(name, {}))
        for finding in dict.fromkeys(findings):
            yield f"{name}: {finding}"


def _silent_ranks(run: RunTrace | None) -> list[str]:
    """Return a finding if ranks of a run did not report the rows; none without such a run."""
    if run is None:
        return []
    # The run, and its only action that reads rows, have one name.
    snapshots = run.at(run.name)
    return list(every_rank(snapshots, run.world_size, run.name))


def _without_an_epoch(rows_by_rank: RowsByRank) -> Iterator[str]:
    """Yield a finding for each rank that is given rows in fewer epochs than another one.

    What is compared with its rows would only say so again.
    """
    most = max(len(infos[0].epochs) for infos in rows_by_rank.values())
    for rank, infos in sorted(rows_by_rank.items()):
        loader = infos[0].expected
        count = len(infos[0].epochs)
        # If the loader neither fills nor drops, ranks are given unequally many rows, and a rank
        # may rightly have none at all.
        must_have_rows = count > 0 or loader.filled or loader.dropped
        if must_have_rows and count < most:
            yield f"rank {rank} is given rows in {count} of {most} epochs"


def _same_with_another_seed(
    rows_by_rank: RowsByRank, full_run: Mapping[str, RowsByRank]
) -> Iterator[str]:
    """Yield a finding if a loader has the order of the loader from which only its seed differs."""
    infos = _only_records(rows_by_rank)
    base = infos[0].expected.reseeded
    if base not in full_run:
        return
    base_infos = _only_records(full_run[base])
    if _epoch_of_each(infos, 0) == _epoch_of_each(base_infos, 0):
        yield f"its order is that of {base}; expected another one, as the seed is another"


def _rows_by_loader(run: RunTrace | None) -> Mapping[str, RowsByRank]:
    """Return loader name -> what it gave each rank in a run; empty if there is no such run.

    The runs ``resumed_rows`` and ``moved_rows`` are missing where no loader can resume.
    """
    if run is None:
        return {}
    rows: dict[str, dict[int, list[RowsInfo]]] = {}
    for snapshot in run.snapshots:
        for info in snapshot.rows:
            rows_by_rank = rows.setdefault(info.loader, {})
            rows_by_rank.setdefault(snapshot.rank, []).append(info)
    return rows


def _unlike_peers(cell: Cell, rows_by_rank: RowsByRank) -> Iterator[str]:
    """Yield a finding for each rank that is given other rows than its peers.

    Peers are ranks that must be given the same rows, such as tensor-parallel ranks. Each rank is
    compared with the first of its peers.
    """
    first_by_place = _first_ranks(cell, rows_by_rank)
    for rank, infos in sorted(rows_by_rank.items()):
        first = first_by_place[cell.dp_rank(rank)]
        info = infos[0]
        first_info = rows_by_rank[first][0]
        if info.epochs == first_info.epochs:
            continue
        rows = _listed(_epoch(info, 0))
        first_rows = _listed(_epoch(first_info, 0))
        given = f"ranks {rank} and {first} are given different rows: {rows} and {first_rows}"
        yield f"{given}; expected the same, as they hold {shared_by(cell, rank, first)}"


def _once_for_peers(cell: Cell, rows_by_rank: RowsByRank) -> RowsByRank:
    """Return the rows of one rank of each group of peers, so that shared rows count once."""
    first_ranks = _first_ranks(cell, rows_by_rank).values()
    return {rank: rows_by_rank[rank] for rank in first_ranks}


def _first_ranks(cell: Cell, ranks: Iterable[int]) -> dict[int, int]:
    """Return data parallel rank -> the lowest rank with it. Ranks that share rows have the same."""
    first_by_place: dict[int, int] = {}
    for rank in sorted(ranks):
        first_by_place.setdefault(cell.dp_rank(rank), rank)
    return first_by_place


def _only_records(rows_by_rank: RowsByRank) -> list[RowsInfo]:
    """Return the record of each rank, of a loader that was started only once on each."""
    return [info for (info,) in rows_by_rank.values()]


def _epoch(info: RowsInfo, number: int) -> Batches:
    """Return the batches of an epoch; none if it was not read.

    Args:
        info: What a loader gave a rank.
        number: The number of the epoch, counted from 0, the first that was read.
    """
    if number < len(info.epochs):
        return info.epochs[number]
    return ()


def _epoch_of_each(infos: Iterable[RowsInfo], number: int) -> list[Batches]:
    """Return the batches of an epoch of each rank, see ``_epoch``."""
    return [_epoch(info, number) for info in infos]


def _other_epochs(full_rows: RowsByRank) -> Iterator[str]:
    """Yield findings about the unbroken run: the rows of its two epochs, and their order."""
    infos = _only_records(full_rows)
    loader = infos[0].expected
    first_epoch = _epoch_of_each(infos, 0)
    second_epoch = _epoch_of_each(infos, 1)
    for text in _not_each_once(first_epoch, loader):
        yield f"epoch 1: {text}"
    for text in _not_each_once(second_epoch, loader):
        yield f"epoch 2: {text}"
    if loader.shuffled and first_epoch == second_epoch:
        yield "epoch 2 has the order of epoch 1; expected another one"
    if not loader.shuffled and first_epoch != second_epoch:
        yield "epoch 2 has another order than epoch 1; expected the order of the data"


def _not_each_once(
    batches_by_rank: Sequence[Batches], loader: Loader, before: Sequence[Batches] = ()
) -> Iterator[str]:
    """Yield findings about rows that no rank was given, and rows that were given repeatedly.

    Args:
        batches_by_rank: What each data parallel rank was given in an epoch, by place in the list.
        loader: What the driver says of the loader: whether it shuffles, fills, drops or resumes.
        before: What the ranks of another run were given earlier in the same epoch.
    """
    times_given = _times_given([*batches_by_rank, *before])
    rows_of_batches = _rows_of_first_step(batches_by_rank)
    if before:
        # A run that resumed where fewer rows are left than it reads in a step may be given none.
        # Then the batches before that run say how many rows so many ranks read.
        rows_of_rank = _rows_of_first_step(before) / len(before)
        rows_of_batches = max(rows_of_batches, math.ceil(rows_of_rank * len(batches_by_rank)))
    rows_of_step = loader.turns * rows_of_batches
    unequal = list(_unequal_batches(batches_by_rank, loader))
    if not unequal:
        # The rows of the batches that some ranks lack are given to none.
        yield from _missing_rows(times_given, loader, rows_of_step)
    yield from _repeated_rows(times_given, loader, rows_of_step)
    for place, batches in enumerate(batches_by_rank):
        if () in batches:
            number = list(batches).index(()) + 1
            batch = f"batch {number} of data parallel rank {place}"
            yield f"{batch} has no rows: a mean over it is no number"
    yield from unequal


def _unequal_batches(batches_by_rank: Sequence[Batches], loader: Loader) -> Iterator[str]:
    """Yield a finding if ranks are given more batches than others, and none may be."""
    lengths = [str(len(batches)) for batches in batches_by_rank]
    if (loader.filled or loader.dropped) and len(set(lengths)) > 1:
        yield f"ranks are given {', '.join(lengths)} batches; expected equally many"


def _missing_rows(times_given: Counter[int], loader: Loader, rows_of_step: int) -> Iterator[str]:
    """Yield a finding if rows are given to no rank.

    A loader that drops incomplete steps may leave out fewer rows than a step has.
    """
    count = loader.rows or ROWS
    missing = sorted(set(range(count)) - times_given.keys())
    if not missing:
        return
    if loader.dropped and len(missing) < rows_of_step:
        return
    first = missing[0]
    yield f"{len(missing)} of {count} rows are given to no rank, first {first}"


def _repeated_rows(times_given: Counter[int], loader: Loader, rows_of_step: int) -> Iterator[str]:
    """Yield a finding if rows are given repeatedly.

    A loader that fills its last batches may repeat fewer rows than a step has.
    """
    surplus = sum(times_given.values()) - len(times_given)
    if not surplus:
        return
    if loader.filled and surplus < rows_of_step:
        return
    repeated: list[int] = []
    for row in sorted(times_given):
        if times_given[row] > 1:
            repeated.append(row)
    most = max(times_given.values())
    times = f"up to {most} times"
    if most == 2:
        times = "twice"
    allowed = "none"
    if loader.filled:
        allowed = f"less than {rows_of_step}, which fill the last batches"
    given = f"{len(repeated)} rows are given {times}"
    yield f"{given}, first {repeated[0]}; expected {allowed}"


def _times_given(batches_by_rank: Sequence[Batches]) -> Counter[int]:
    """Return row number -> how often it was given, on all ranks together."""
    times: Counter[int] = Counter()
    for batches in batches_by_rank:
        for batch in batches:
            times.update(batch)
    return times


def _rows_of_first_step(batches_by_rank: Sequence[Batches]) -> int:
    """Return how many rows the first batches of all ranks have together."""
    rows = 0
    for batches in batches_by_rank:
        if batches:
            rows += len(batches[0])
    return rows


def _not_continued(full_rows: RowsByRank, resumed_rows: RowsByRank) -> Iterator[str]:
    """Yield a finding for each rank that goes on with other rows than the run that never stopped.

    Args:
        full_rows: What the run ``rows`` was given, which never stopped.
        resumed_rows: What the run ``resumed_rows`` was given.
    """
    for rank, infos in resumed_rows.items():
        full = full_rows[rank][0]
        for info in infos:
            # The unbroken run counts epochs from 0; the first epoch of a resumed record is the one
            # in which it resumed.
            expected = _epoch(full, info.epoch)[info.done :]
            resumed = _epoch(info, 0)
            if resumed == expected:
                continue
            place = "at the beginning"
            if info.done:
                place = "in the middle"
            where = f"resumed {place} of epoch {info.epoch + 1}"
            rows = f"{_listed(resumed)}; {_listed(expected)} in the run that never stopped"
            yield f"{where} rank {rank} is given rows {rows}"


def _other_lengths(rows_by_rank: RowsByRank) -> Iterator[str]:
    """Yield a finding for each epoch of a rank in which it is given more, or fewer, batches."""
    for rank, infos in sorted(rows_by_rank.items()):
        for info in infos:
            yield from _other_lengths_of_rank(rank, info)


def _other_lengths_of_rank(rank: int, info: RowsInfo) -> Iterator[str]:
    """Yield a finding for each epoch in which the rank is given more, or fewer, batches."""
    for number, length in enumerate(info.lengths):
        batches = len(info.epochs[number])
        if length is None or length == batches:
            continue
        where = f"epoch {info.epoch + number + 1}"
        # Only the first epoch of a record may have been resumed in its middle.
        if number == 0 and info.done:
            where = f"resumed in the middle of {where}"
        given = f"{where}: rank {rank} is given {batches} batches"
        yield f"{given}; the loader's length is {length}"


def _not_continued_resharded(full_rows: RowsByRank, resharded_rows: RowsByRank) -> Iterator[str]:
    """Yield findings about twice as many ranks that resume in the middle of the second epoch.

    What they are given, and what the first ranks were given before, must be each row once.

    Args:
        full_rows: What one rank of each group of peers was given in the run ``rows``.
        resharded_rows: What the ranks of the run ``moved_rows`` were given.
    """
    infos = _only_records(resharded_rows)
    full_infos = _only_records(full_rows)
    batches = _epoch_of_each(infos, 0)
    batches_before: list[Batches] = []
    for info, full in zip(infos, full_infos, strict=False):
        # A step of twice as many ranks has the rows of two steps.
        batches_before.append(_epoch(full, 1)[: 2 * info.done])
    for text in _not_each_once(batches, full_infos[0].expected, batches_before):
        yield f"at {len(batches)} ranks from the middle of epoch 2 on: {text}"


def _listed(batches: Batches) -> str:
    """Return the first six rows as text: ``4, 17, 0, 9, 2, 5 ...``, or ``none``."""
    rows: list[str] = []
    for batch in batches:
        rows += [str(row) for row in batch]
    if not rows:
        return "none"
    text = ", ".join(rows[:6])
    if len(rows) > 6:
        return f"{text} ..."
    return text


#: How far a metric may deviate from that of one process, relatively: several ranks sum in another
#: order.
TOLERANCE = 1e-5


def _has_metrics(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why ``evaluation`` does not apply to a cell; None if it does."""
    if not driver.can("metrics"):
        return "the driver has no metrics()"
    if not driver.evaluates_in(cell):
        return "the driver's metrics are not computed on this mesh"
    return tested_once(cell, driver)


@check(
    scenario=EVALUATION,
    until=(("rows", "metrics", 0), ("alone", "metrics", 0)),
    order=9,
    not_applicable=_has_metrics,
    costly=True,
    depends_on=DATA_PLACE,
)
def evaluation(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that each metric equals, on every rank, the metric of one process.

    The rows that it is taken over do not divide by the ranks.

    If it fails: rows that fill the last batches are counted twice, or a mean of the ranks' means is
    taken. Gather with ``gather_for_metrics``, which leaves such rows out.
    """
    snapshots = trace.run("rows").at("metrics")
    yield from every_rank(snapshots, cell.world_size, "metrics")
    # One process needs no gathering, so it cannot count rows twice.
    reference = trace.run("alone").first("metrics")
    if reference is None or not reference.metrics:
        yield "metrics() returns no metric in one process, so there is nothing to compare with"
        return
    for snapshot in snapshots:
        missing = sorted(reference.metrics.keys() - snapshot.metrics.keys())
        if missing:
            names = and_others(missing)
            yield f"rank {snapshot.rank}: metrics() lacks {names}, which one process returns"
        for name, metric in sorted(snapshot.metrics.items()):
            expected = reference.metrics.get(name)
            if expected is None:
                yield f"rank {snapshot.rank}: {name} is {metric:.6g}; missing in one process"
            elif not math.isclose(metric, expected, rel_tol=TOLERANCE):
                values = f"{metric:.6g}; {expected:.6g} in one process"
                yield f"rank {snapshot.rank}: {name} is {values}"
