"""Is each row of the data given to one rank, once an epoch, and is a metric over several ranks that of one process?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.driver import Driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import EVALUATION, ROWS
from pytest_distcompat.scenario import coverage as runs_of_loaders
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import Loader, RowsInfo, RunTrace, Trace

#: Batches of rows.
Batches = Sequence[Sequence[int]]


def tested_once(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why another cell tests what depends on neither strategy nor precision; None if this one does."""
    names = ((name, precision) for precision in PRECISIONS.names() for name in STRATEGIES.names())
    cells = (Cell(*pair, cell.world_size, nodes=cell.nodes) for pair in names)
    first = next((one for one in cells if not driver.unsupported_reason(one)), cell)
    elsewhere = f"data are loaded alike in all cells, and that is tested in {first.strategy}-{first.precision}"
    return elsewhere if cell != first else None


def _has_loaders(cell: Cell, driver: type[Driver]) -> str | None:
    missing = "the driver declares no loaders, whose rows() gives the rows"
    return tested_once(cell, driver) if driver.loaders else missing


@check(
    scenario=lambda cell, driver: runs_of_loaders(cell.world_size, driver.loaders.values()),
    until=(("rows", "rows", 0), ("resumed_rows", "resumed_rows", 0), ("moved_rows", "moved_rows", 0)),
    order=9,
    not_applicable=_has_loaders,
    costly=True,
)
def coverage(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that each loader gives every row to one rank in each epoch, resumed and at another world size too.

    The rows do not divide by the ranks, so some may be given twice to fill the last batches. A shuffled loader has
    another order in each epoch. Resumed between epochs, or in the middle of the second, it goes on with the next rows;
    twice as many ranks share those left.

    If it fails: with rows on several ranks nothing shards the data; with rows on none two samplers do (``DistributedSampler``
    and the trainer's). With the same order in each epoch ``set_epoch`` is not called. A resumed run needs the epoch's seed and
    the number of batches done.
    """
    yield from every_rank(trace.run("rows").at("rows"), cell.world_size, "rows")
    whole, resumed, moved = (_by_loader(trace.runs.get(name)) for name in ("rows", "resumed_rows", "moved_rows"))
    for name, ranks in whole.items():
        loader = next(iter(ranks.values()))[0].expected
        first, second = ([_epoch(info, number) for (info,) in ranks.values()] for number in (0, 1))
        found = [f"epoch 1: {text}" for text in _each_once(first, loader)]
        found += [f"epoch 2: {text}" for text in _each_once(second, loader)]
        if loader.shuffled and first == second:
            found.append("epoch 2 has the order of epoch 1; expected another one")
        if not loader.shuffled and first != second:
            found.append("epoch 2 has another order than epoch 1; expected the order of the data")
        for rank, infos in resumed.get(name, {}).items():
            found += [text for info in infos for text in _continued(rank, info, ranks[rank][0])]
        if name in moved:
            batches = [_epoch(info, 0) for (info,) in moved[name].values()]
            before = [one[: 2 * info.done] for (info,), one in zip(moved[name].values(), second, strict=False)]
            where = f"at {len(batches)} ranks from the middle of epoch 2 on"
            found += [f"{where}: {text}" for text in _each_once(batches, loader, before)]
        yield from (f"{name}: {text}" for text in dict.fromkeys(found))


def _by_loader(run: RunTrace | None) -> Mapping[str, Mapping[int, Sequence[RowsInfo]]]:
    """Return loader -> rank -> what it was given."""
    found: dict[str, dict[int, list[RowsInfo]]] = {}
    for snapshot in run.snapshots if run else ():
        for info in snapshot.rows:
            found.setdefault(info.loader, {}).setdefault(snapshot.rank, []).append(info)
    return found


def _epoch(info: RowsInfo, number: int) -> Batches:
    return info.epochs[number] if number < len(info.epochs) else ()


def _each_once(ranks: Sequence[Batches], loader: Loader, before: Sequence[Batches] = ()) -> Iterator[str]:
    """Yield findings about rows that no rank was given, or several were, those given before included."""
    given = Counter(row for batches in (*ranks, *before) for batch in batches for row in batch)
    missing, again = sorted(set(range(ROWS)) - given.keys()), sorted(row for row, times in given.items() if times > 1)
    # After the last batch, none is left to tell how many rows a step has but those before.
    step = max(sum(len(batches[0]) for batches in some if batches) for some in (ranks, before))
    if missing and not (loader.dropped and len(missing) < step):
        yield f"{len(missing)} of {ROWS} rows are given to no rank, first {missing[0]}"
    surplus = sum(given.values()) - len(given)
    if surplus and not (loader.filled and surplus < step):
        times = "twice" if max(given.values()) == 2 else f"up to {max(given.values())} times"
        allowed = f"less than {step}, which fill the last batches" if loader.filled else "none"
        yield f"{len(again)} rows are given {times}, first {again[0]}; expected {allowed}"
    if len({len(batches) for batches in ranks}) > 1 and (loader.filled or loader.dropped):
        yield f"ranks are given {', '.join(str(len(batches)) for batches in ranks)} batches; expected equally many"


def _continued(rank: int, info: RowsInfo, whole: RowsInfo) -> Iterator[str]:
    expected, found = _epoch(whole, info.epoch)[info.done :], _epoch(info, 0)
    if found != expected:
        where = f"{'in the middle' if info.done else 'at the beginning'} of epoch {info.epoch + 1}"
        follow = f"{_listed(found)}; {_listed(expected)} in the run that never stopped"
        yield f"resumed {where} rank {rank} is given rows {follow}"


def _listed(batches: Batches) -> str:
    rows = [str(row) for batch in batches for row in batch]
    return ", ".join(rows[:6]) + (" ..." if len(rows) > 6 else "") if rows else "none"


#: Relative: means are summed in another order.
TOLERANCE = 1e-5


def _has_metrics(cell: Cell, driver: type[Driver]) -> str | None:
    return tested_once(cell, driver) if driver.can("metrics") else "the driver has no metrics()"


@check(
    scenario=EVALUATION,
    until=(("rows", "metrics", 0), ("alone", "metrics", 0)),
    order=9,
    not_applicable=_has_metrics,
    costly=True,
)
def evaluation(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that each metric over rows that do not divide by the ranks equals the metric of one process, on every rank.

    If it fails: rows that fill the last batches are counted twice, or a mean of the ranks' means is taken. Gather with
    ``gather_for_metrics``, which leaves such rows out.
    """
    here, there = trace.run("rows").at("metrics"), trace.run("alone").first("metrics")
    yield from every_rank(here, cell.world_size, "metrics")
    expected = there.metrics if there else {}
    if not expected:
        yield "metrics() returns no metric in one process, so there is nothing to compare with"
        return
    for snapshot in here:
        for name in sorted(expected.keys() | snapshot.metrics.keys()):
            found, alone = (one.get(name, math.nan) for one in (snapshot.metrics, expected))
            if not math.isclose(found, alone, rel_tol=TOLERANCE):
                texts = (f"{one[name]:.6g}" if name in one else "missing" for one in (snapshot.metrics, expected))
                yield f"rank {snapshot.rank}: {name} is {'; '.join(texts)} in one process"
