"""Does training go on from a checkpoint as if it had never stopped?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.scenario import RESUME
from pytest_distcompat.trace import Moment, Trace

#: Parameters and state come back bit by bit; a loss is summed in an order that a GPU does not fix.
LOSS_TOLERANCE = 1e-4


@check(scenario=RESUME, until=(("train", "step", 4), ("resume", "step", 1)), order=4)
def resume(cell: Cell, trace: Trace) -> Iterator[str]:
    """Saved, and loaded in a fresh process group: parameters, every tensor of the optimizer's state, its step count and
    the scheduler are equal bit by bit, and the next two losses equal those of the run that never stopped.

    If it fails: state that is missing after the load was not saved, or went into an optimizer that a step would have
    filled first (https://github.com/huggingface/accelerate/pull/3904). The first loss tells of parameters only; it takes
    the second to tell of the optimizer.
    """
    whole, resumed = trace.life("train"), trace.life("resume")
    saved, loaded = whole.at("save"), resumed.at("load")
    yield from every_rank(saved, cell.world_size, "save")
    yield from every_rank(loaded, cell.world_size, "load")
    for before, after in zip(saved, loaded, strict=False):
        yield from _values(before, after)
        yield from _state(before, after)
        if before.scheduler != after.scheduler:
            yield f"rank {after.rank}: scheduler is at {after.scheduler!r}; saved at {before.scheduler!r}"
    for nth in (0, 1):
        yield from _losses(nth, whole.at("step", 3 + nth), resumed.at("step", nth))


def _values(before: Moment, after: Moment) -> Iterator[str]:
    for what, saved, loaded in (
        ("parameter", before.model and before.model.parameters, after.model and after.model.parameters),
        ("buffer", before.model and before.model.buffers, after.model and after.model.buffers),
    ):
        was = {fact.name: fact.digest for fact in saved or ()}
        now = {fact.name: fact.digest for fact in loaded or ()}
        yield from _differences(f"rank {after.rank}: {what}", was, now)


def _state(before: Moment, after: Moment) -> Iterator[str]:
    was = {f"{s.key} of {s.owner}": s.digest for s in (before.optimizer.states if before.optimizer else ())}
    now = {f"{s.key} of {s.owner}": s.digest for s in (after.optimizer.states if after.optimizer else ())}
    if was and not now:
        yield f"rank {after.rank}: the optimizer's state is empty after the load; {len(was)} tensors were saved"
        return
    yield from _differences(f"rank {after.rank}: optimizer state", was, now)


def _differences(what: str, was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for title, wrong in (
        ("missing after the load", sorted(set(was) - set(now))),
        ("new after the load", sorted(set(now) - set(was))),
        ("other values after the load", sorted(key for key in set(was) & set(now) if was[key] != now[key])),
    ):
        if wrong:
            yield f"{what} {wrong[0]!r}{f' and {len(wrong) - 1} others' if len(wrong) > 1 else ''}: {title}"


def _losses(nth: int, whole: tuple[Moment, ...], resumed: tuple[Moment, ...]) -> Iterator[str]:
    for expected, found in zip(whole, resumed, strict=False):
        if expected.loss is None or found.loss is None:
            yield f"rank {found.rank}: no loss to compare"
        elif not math.isclose(expected.loss, found.loss, rel_tol=LOSS_TOLERANCE):
            yield (
                f"rank {found.rank}: loss {nth + 1} after the load is {found.loss:.6g}; "
                f"{expected.loss:.6g} in the run that never stopped"
            )
