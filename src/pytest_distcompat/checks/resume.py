"""Does training resume from a checkpoint as if it had never stopped, and does saving leave what is trained as it is?"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import (
    RESUMED,
    UNTIL_RESUMED,
    and_others,
    check,
    every_rank,
    finite_losses,
    other_mode,
    pairs,
    stale,
    trained_again,
)
from pytest_distcompat.checks._values import held_states, same_dtype, unlike
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import RESUME, SAVED, TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ParameterInfo, RunTrace, Snapshot, Trace

#: Relative. State must come back bit by bit, but a GPU may sum a loss in any order.
LOSS_TOLERANCE = 1e-4

#: Relative. In bfloat16 a sum of more than two numbers depends on their order, and DDP rebuilds its buckets, hence the order,
#: after the first step of a run: the second loss differed by 1e-3 at 4 ranks with all state equal.
ORDER_TOLERANCE = 5e-3

#: Relative. A learning rate may be computed from the number of the step, or from the previous rate.
RATE_TOLERANCE = 1e-9


@check(scenario=RESUME, until=UNTIL_RESUMED, order=4, depends_on=RESUMED)
def resume(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a checkpoint loaded in a fresh process group restores everything, and that training goes on from it.

    Parameters, optimizer, scheduler and scaler are bit by bit what was saved; the optimizer holds the live parameters, and
    the same ones are trainable. The next two losses and learning rates are those of the uninterrupted run. A buffer that
    each rank fills from its own data (BatchNorm) may come back as any rank saved it
    (https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).

    If it fails: state was not saved, or was loaded into an optimizer that has none before its first step
    (https://github.com/huggingface/accelerate/pull/3904). The first loss depends on parameters only, the second on the
    optimizer too.
    """
    whole, resumed = trace.run("train"), trace.run("resume")
    trained, saved, loaded = whole.at("step", SAVED - 1), whole.at("save"), resumed.at("load")
    yield from every_rank(trained, cell.world_size, "three steps")
    yield from every_rank(saved, cell.world_size, "save")
    yield from every_rank(loaded, cell.world_size, "load")
    steps = [whole.at("step", nth) for nth in range(SAVED + 2)]
    # ``_losses`` reports those without a loss. Later findings follow from the first.
    with_loss = ([one for one in snapshots if one.loss is not None] for snapshots in steps)
    infinite = ([*finite_losses(snapshots, f"step {nth}")] for nth, snapshots in enumerate(with_loss, 1))
    yield from next(filter(None, infinite), [])
    yield from trained_again(loaded, (snapshot for snapshots in steps[:SAVED] for snapshot in snapshots))
    for before, after in pairs(trained, saved):
        yield from same_state(before, after, "save")
    saved, loaded = _without_nonpersistent(cell, whole, saved), _without_nonpersistent(cell, whole, loaded)
    for before, after in pairs(saved, loaded):
        yield from _trains_another(before, after)
    if cell.option("save_only_model"):
        for before, after in pairs(saved, loaded):
            yield from _model(before, after, "load", _buffers(saved))
        return
    for before, after in pairs(saved, loaded):
        yield from same_state(before, after, "load", _buffers(saved))
        if before.scaler != after.scaler:
            yield f"rank {after.rank}: the gradient scaler is at {after.scaler}; saved at {before.scaler}"
        if before.scheduler != after.scheduler:
            yield f"rank {after.rank}: scheduler is at {after.scheduler!r}; saved at {before.scheduler!r}"
    # Numbers that differ at the load differ after every later step.
    wrong = [text for before, after in pairs(saved, loaded) for text in _groups(before, after, "")]
    ordered = PRECISIONS.get(cell.precision).compute == "float32" or cell.world_size <= 2
    for nth in (0, 1):
        expected, found = whole.at("step", SAVED + nth), resumed.at("step", nth)
        yield from every_rank(expected, cell.world_size, f"step {nth + 1} after the save")
        yield from every_rank(found, cell.world_size, f"step {nth + 1} after the load")
        for before, after in pairs(expected, found) if not nth else ():
            yield from other_mode(before, after, "step 1 after the load", "in the run that never stopped")
        off = _losses(nth, expected, found, LOSS_TOLERANCE if ordered else ORDER_TOLERANCE)
        yield from (f"{text}{tied_apart(cell, whole)}" for text in off)
        if not wrong:
            wrong = list(_numbers(nth, expected, found))
            yield from wrong


def tied_apart(cell: Cell, run: RunTrace) -> str:
    """Return, for the end of a finding, which tied names FSDP2 has in units of their own; an empty text if there are none."""
    # Each unit gathers and frees its own copy of what is one parameter: https://github.com/pytorch/pytorch/issues/176076.
    model = next((one.model for one in run.at("build") if one.model), None)
    if model is None or run.unwrapped is None or "FSDP2" not in model.wrappers:
        return ""
    strategy = STRATEGIES.get(cell.strategy)
    known = {name for group in run.unwrapped.tied for name in group}
    modules = {name.rpartition(".")[0] for name in known}
    units = {strategy.canonical(unit, cell, modules) for unit in model.units}
    for group in run.unwrapped.tied:
        owners = {name: name.rpartition(".")[0] for name in group}
        if units.issuperset(owners.values()) and len({*owners.values()}) > 1:
            names = " and ".join(map(repr, group))
            cure = "shard them as one, fully_shard([...]), or leave both to the root"
            return f"; {names} are one tensor in units of their own: {cure}"
    return ""


#: Name -> (digest, dtype).
_Tensors = Mapping[str, tuple[str, str]]
#: Name of a buffer -> (digest, dtype) of each rank.
_Buffers = Mapping[str, Collection[tuple[str, str]]]


def _without_nonpersistent(cell: Cell, run: RunTrace, snapshots: tuple[Snapshot, ...]) -> tuple[Snapshot, ...]:
    """Return the snapshots without buffers that are not persistent: a fresh process makes those anew."""
    known = {info.name: info.persistent for info in (run.unwrapped.buffers if run.unwrapped else ())}
    canonical = STRATEGIES.get(cell.strategy).canonical

    def persistent(held: tuple[ParameterInfo, ...]) -> tuple[ParameterInfo, ...]:
        return tuple(info for info in held if known.get(canonical(info.name, cell, known), not known))

    return tuple(
        replace(one, model=one.model and replace(one.model, buffers=persistent(one.buffers))) for one in snapshots
    )


def _buffers(snapshots: tuple[Snapshot, ...]) -> _Buffers:
    """Return the values that any rank had, by buffer."""
    found: dict[str, set[tuple[str, str]]] = {}
    for snapshot in snapshots:
        for info in snapshot.buffers:
            found.setdefault(info.name, set()).add((info.digest, info.dtype))
    return found


def same_state(before: Snapshot, after: Snapshot, action: str, anywhere: _Buffers | None = None) -> Iterator[str]:
    """Yield findings for state that an action changed although it must not."""
    yield from _model(before, after, action, anywhere or {})
    where = f"rank {after.rank}: "
    was, now = ({f"{s.key} of {s.owner}": (s.digest, s.dtype) for s in held_states(one)} for one in (before, after))
    if was and not now:
        held = f"{len(was)} tensors were saved" if action == "load" else f"it held {len(was)} tensors before"
        yield f"{where}the optimizer's state is empty after the {action}; {held}"
        return
    yield from _differences(f"{where}optimizer state", was, now, action)
    yield from _groups(before, after, action)


def _model(before: Snapshot, after: Snapshot, action: str, anywhere: _Buffers) -> Iterator[str]:
    """Yield findings for changed parameters and buffers; a buffer may also have any of its values in ``anywhere``."""
    for kind in ("parameter", "buffer"):
        held, found = (
            {info.name: (info.digest, info.dtype) for info in (one.buffers if kind == "buffer" else one.parameters)}
            for one in (before, after)
        )
        if kind == "buffer":
            found = {name: held.get(name, one) if one in anywhere.get(name, ()) else one for name, one in found.items()}
        yield from _differences(f"rank {after.rank}: {kind}", held, found, action)


def _trains_another(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield findings unless what is loaded is what the optimizer updates; at a small learning rate two losses do not show it."""
    where, was, now = f"rank {after.rank}", before.optimizer, after.optimizer
    if was and now and now.foreign > was.foreign:
        yield f"{where}: {stale(now, ' after the load')}"
    trained, loaded = ({info.name: info.trainable for info in one.parameters} for one in (before, after))
    both = trained.keys() & loaded.keys()
    for title, wrong in (
        ("frozen after the load, and trained before", {name for name in both if trained[name] and not loaded[name]}),
        ("trainable after the load, and frozen before", {name for name in both if loaded[name] and not trained[name]}),
    ):
        if wrong:
            yield f"{where}: parameter {and_others(wrong)}: {title}"


def _groups(before: Snapshot, after: Snapshot, action: str) -> Iterator[str]:
    where, was, now = f"rank {after.rank}", before.param_groups, after.param_groups
    if len(was) != len(now):
        yield f"{where}: the optimizer has {len(now)} param groups after the {action}; {len(was)} before"
    for number, key, old, new in unlike(was, now):
        yield f"{where}: {key} of the optimizer's group {number} is {new} after the {action}; {old} before"


def _differences(kind: str, was: _Tensors, now: _Tensors, action: str) -> Iterator[str]:
    both = set(was) & set(now)
    for title, wrong in (
        (f"missing after the {action}", set(was) - set(now)),
        (f"new after the {action}", set(now) - set(was)),
        (f"other values after the {action}", {key for key in both if was[key][0] != now[key][0]}),
        (f"another dtype after the {action}", {key for key in both if not same_dtype(was[key][1], now[key][1])}),
    ):
        if wrong:
            yield f"{kind} {and_others(wrong)}: {title}"


def _losses(nth: int, whole: tuple[Snapshot, ...], resumed: tuple[Snapshot, ...], tolerance: float) -> Iterator[str]:
    for expected, found in pairs(whole, resumed):
        if expected.loss is None or found.loss is None:
            yield f"rank {found.rank}: no loss to compare; expected step() to return it"
        elif math.isfinite(expected.loss) and not math.isclose(expected.loss, found.loss, rel_tol=tolerance):
            finding = f"loss {nth + 1} after the load is {found.loss:.6g}"
            yield f"rank {found.rank}: {finding}; {expected.loss:.6g} in the run that never stopped"


def _numbers(nth: int, whole: tuple[Snapshot, ...], resumed: tuple[Snapshot, ...]) -> Iterator[str]:
    """Yield findings for numbers of param groups after a step; those of the last step affect no loss."""
    when = f"after step {nth + 1} of the resumed run"
    for expected, found in pairs(whole, resumed):
        for number, key, old, new in unlike(expected.param_groups, found.param_groups, RATE_TOLERANCE):
            if old is not None and new is not None:
                finding = f"{key} of the optimizer's group {number} is {new:.6g} {when}"
                yield f"rank {found.rank}: {finding}; {old:.6g} in the run that never stopped"


@check(scenario=TRAIN, until=(("train", "save", 0), ("train", "exported", 0)), order=9)
def observers(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that neither saving a checkpoint nor exporting the weights changes what is trained.

    Parameters, buffers, optimizer, scheduler, scaler and torch's random state stay equal bit by bit, and the step after a save
    has the same modules in training mode as that before it.

    If it fails: look for a step of the optimizer that creates state to save, for weights that are cast or moved in place, for
    what draws random numbers, and for an evaluation without ``model.train()`` after it.
    """
    train = trace.run("train")
    for was, now in pairs(train.at("step", SAVED - 1), train.at("step", SAVED)):
        yield from other_mode(was, now, "the step after the save", "before it")
    for action, before, after in (
        ("save", train.at("step", SAVED - 1), train.at("save")),
        ("export", train.at("export"), train.at("exported")),
    ):
        yield from every_rank(after, cell.world_size, action)
        for was, now in pairs(before, after):
            if was.model is None or now.model is None:
                continue  # the driver has no export()
            yield from same_state(was, now, action)
            trainable = [{info.name for info in one.parameters if info.trainable} for one in (was, now)]
            for what, old, new in (
                ("scheduler", was.scheduler, now.scheduler),
                ("gradient scaler", was.scaler, now.scaler),
                ("random state", was.rng, now.rng),
                ("set of trainable parameters", *trainable),
            ):
                if old != new:
                    yield f"rank {now.rank}: the {what} is another after the {action}"
