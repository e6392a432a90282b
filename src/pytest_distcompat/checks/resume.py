"""Does training go on from a checkpoint as if it had never stopped?"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, finite_losses, pairs, trained_again
from pytest_distcompat.checks._values import held_states, same_dtype, unlike
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import RESUME, SAVED
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ModelInfo, OptimizerInfo, RunTrace, Snapshot, Trace

#: Parameters and state come back bit by bit; a loss is summed in an order that a GPU does not fix.
LOSS_TOLERANCE = 1e-4

#: In bfloat16 more than two numbers add up to a sum that depends on their order, and DDP rebuilds its buckets, hence the
#: order, after the first step of a run: relative differences of 1e-3 in the second loss, seen at 4 ranks with all state equal.
ORDER_TOLERANCE = 5e-3

#: A learning rate may be worked out from the number of the step, or from the one before it.
ROUNDING = 1e-9


@check(scenario=RESUME, until=(("train", "step", 4), ("resume", "step", 1)), order=4)
def resume(cell: Cell, trace: Trace) -> Iterator[str]:
    """Losses are finite, and saving changes nothing. Loaded in a fresh process group, without training again, parameters, every
    tensor of the optimizer's state, its step count, its learning rate and other numbers, the scheduler and the gradient scaler
    are equal bit by bit to what was saved, in the same dtypes, and the next two losses, learning rates and other numbers equal
    those of the run that never stopped. Of a checkpoint that holds the model alone, parameters and buffers come back. A buffer
    that each rank fills from its own data (the statistics of BatchNorm) may come back as any rank saved it: DDP gives all that
    of rank 0 before a step
    (``broadcast_buffers``, https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).

    If it fails: state that is missing after the load was not saved, or went into an optimizer that a step would have
    filled first (https://github.com/huggingface/accelerate/pull/3904). The first loss tells of parameters only; it
    takes the second to tell of the optimizer. A load that trains again from the start reaches the same state, and would lose
    all that a longer run had learned.
    """
    whole, resumed = trace.run("train"), trace.run("resume")
    trained, saved, loaded = whole.at("step", SAVED - 1), whole.at("save"), resumed.at("load")
    yield from every_rank(trained, cell.world_size, "three steps")
    yield from every_rank(saved, cell.world_size, "save")
    yield from every_rank(loaded, cell.world_size, "load")
    steps = [whole.at("step", nth) for nth in range(SAVED + 2)]
    infinite = ([*finite_losses(_with_loss(snapshots), f"step {nth}")] for nth, snapshots in enumerate(steps, 1))
    # What comes after follows from it.
    yield from next(filter(None, infinite), [])
    yield from trained_again(loaded, (snapshot for snapshots in steps[:SAVED] for snapshot in snapshots))
    for before, after in pairs(trained, saved):
        yield from _same(before, after, "save")
    saved, loaded = _without_loose(cell, whole, saved), _without_loose(cell, whole, loaded)
    if cell.option("save_only_model"):
        for before, after in pairs(saved, loaded):
            yield from _model(before, after, "load", _buffers(saved))
        return
    for before, after in pairs(saved, loaded):
        yield from _same(before, after, "load", _buffers(saved))
        if before.scaler != after.scaler:
            yield f"rank {after.rank}: the gradient scaler is at {after.scaler}; saved at {before.scaler}"
        if before.scheduler != after.scheduler:
            yield f"rank {after.rank}: scheduler is at {after.scheduler!r}; saved at {before.scheduler!r}"
    # What was another at the load is another ever after.
    wrong = [
        text for before, after in pairs(saved, loaded) for text in _groups(before.optimizer, after.optimizer, "", "")
    ]
    for nth in (0, 1):
        expected, found = whole.at("step", SAVED + nth), resumed.at("step", nth)
        yield from every_rank(expected, cell.world_size, f"step {nth + 1} after the save")
        yield from every_rank(found, cell.world_size, f"step {nth + 1} after the load")
        yield from _losses(nth, expected, found, _tolerance(cell))
        if not wrong:
            wrong = list(_numbers(nth, expected, found))
            yield from wrong


def _with_loss(snapshots: tuple[Snapshot, ...]) -> Iterator[Snapshot]:
    """Yield those that say what the loss was; of the others ``_losses`` speaks."""
    return (snapshot for snapshot in snapshots if snapshot.loss is not None)


#: Name to (digest, dtype).
_Tensors = Mapping[str, tuple[str, str]]
#: Name of a buffer to what ranks had there.
_Buffers = Mapping[str, Collection[tuple[str, str]]]


def _without_loose(cell: Cell, run: RunTrace, snapshots: tuple[Snapshot, ...]) -> tuple[Snapshot, ...]:
    """Without the buffers that no checkpoint holds: a fresh process makes them anew, a rotary table may have grown since."""
    first = run.first("build_model")
    unwrapped = first.unwrapped.buffers if first and first.unwrapped else ()
    known = {info.name: info.placement == "persistent" for info in unwrapped}
    canonical = STRATEGIES.get(cell.strategy).canonical

    def kept(model: ModelInfo) -> ModelInfo:
        held = (info for info in model.buffers if known.get(canonical(info.name, cell, known), not known))
        return replace(model, buffers=tuple(held))

    return tuple(replace(snapshot, model=snapshot.model and kept(snapshot.model)) for snapshot in snapshots)


def _buffers(snapshots: tuple[Snapshot, ...]) -> _Buffers:
    """What any rank had in a buffer."""
    found: dict[str, set[tuple[str, str]]] = {}
    for snapshot in snapshots:
        for info in snapshot.model.buffers if snapshot.model else ():
            found.setdefault(info.name, set()).add((info.digest, info.dtype))
    return found


def _same(before: Snapshot, after: Snapshot, action: str, anywhere: _Buffers | None = None) -> Iterator[str]:
    """Everything that training goes on from, before and after an action that must not change it."""
    yield from _model(before, after, action, anywhere or {})
    yield from _optimizer(before.optimizer, after.optimizer, f"rank {after.rank}", action)


def _model(before: Snapshot, after: Snapshot, action: str, anywhere: _Buffers) -> Iterator[str]:
    """``anywhere``: what counts as unchanged, of buffers, beside what the rank itself had."""
    old, new = before.model, after.model
    for what, was, now in (
        ("parameter", old and old.parameters, new and new.parameters),
        ("buffer", old and old.buffers, new and new.buffers),
    ):
        held = {info.name: (info.digest, info.dtype) for info in was or ()}
        found = {info.name: (info.digest, info.dtype) for info in now or ()}
        if what == "buffer":
            found = {name: held.get(name, one) if one in anywhere.get(name, ()) else one for name, one in found.items()}
        yield from _differences(f"rank {after.rank}: {what}", held, found, action)


def _optimizer(before: OptimizerInfo | None, after: OptimizerInfo | None, where: str, action: str) -> Iterator[str]:
    was = {f"{s.key} of {s.owner}": (s.digest, s.dtype) for s in (held_states(before) if before else ())}
    now = {f"{s.key} of {s.owner}": (s.digest, s.dtype) for s in (held_states(after) if after else ())}
    if was and not now:
        held = f"{len(was)} tensors were saved" if action == "load" else f"it held {len(was)} tensors before"
        yield f"{where}: the optimizer's state is empty after the {action}; {held}"
        return
    yield from _differences(f"{where}: optimizer state", was, now, action)
    yield from _groups(before, after, where, action)


def _groups(before: OptimizerInfo | None, after: OptimizerInfo | None, where: str, action: str) -> Iterator[str]:
    groups = (before.param_groups if before else (), after.param_groups if after else ())
    if len(groups[0]) != len(groups[1]):
        yield f"{where}: the optimizer has {len(groups[1])} param groups after the {action}; {len(groups[0])} before"
    for number, key, old, new in unlike(*groups):
        yield f"{where}: {key} of the optimizer's group {number} is {new} after the {action}; {old} before"


def _differences(what: str, was: _Tensors, now: _Tensors, action: str) -> Iterator[str]:
    both = set(was) & set(now)
    for title, wrong in (
        (f"missing after the {action}", set(was) - set(now)),
        (f"new after the {action}", set(now) - set(was)),
        (f"other values after the {action}", {key for key in both if was[key][0] != now[key][0]}),
        (f"another dtype after the {action}", {key for key in both if not same_dtype(was[key][1], now[key][1])}),
    ):
        if wrong:
            first, *others = sorted(wrong)
            yield f"{what} {first!r}{f' and {len(others)} others' if others else ''}: {title}"


def _tolerance(cell: Cell) -> float:
    ordered = PRECISIONS.get(cell.precision).compute == "float32" or cell.world_size <= 2
    return LOSS_TOLERANCE if ordered else ORDER_TOLERANCE


def _losses(nth: int, whole: tuple[Snapshot, ...], resumed: tuple[Snapshot, ...], tolerance: float) -> Iterator[str]:
    for expected, found in pairs(whole, resumed):
        if expected.loss is None or found.loss is None:
            yield f"rank {found.rank}: no loss to compare; expected step() to return it"
        elif math.isfinite(expected.loss) and not math.isclose(expected.loss, found.loss, rel_tol=tolerance):
            yield (
                f"rank {found.rank}: loss {nth + 1} after the load is {found.loss:.6g}; "
                f"{expected.loss:.6g} in the run that never stopped"
            )


def _numbers(nth: int, whole: tuple[Snapshot, ...], resumed: tuple[Snapshot, ...]) -> Iterator[str]:
    """Each loss tells of the learning rate of the step before it: what is set in the last one shows here only."""
    when = f"after step {nth + 1} of the resumed run"
    for expected, found in pairs(whole, resumed):
        was, now = (one.optimizer.param_groups if one.optimizer else () for one in (expected, found))
        for number, key, old, new in unlike(was, now, ROUNDING):
            if old is not None and new is not None:
                told = f"{key} of the optimizer's group {number} is {new:.6g} {when}"
                yield f"rank {found.rank}: {told}; {old:.6g} in the run that never stopped"
