"""Does a trainer do what one process does, whatever its user calls in whatever order?"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_distcompat.calls import REFERENCE_CALL, RESUME, Call
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, named_ranks
from pytest_distcompat.checks._values import Names
from pytest_distcompat.driver import Driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.trace import RunTrace, Snapshot, Sums, Trace

#: How far sums of parameters may be from the reference's, relative to the largest possible; the second for rounded products.
TOLERANCE, ROUNDED_TOLERANCE = 1e-5, 5e-2
#: The calls that change no bit of what is trained, though they are no observers.
_QUIET = frozenset({"skip", "new_epoch"})
#: A call, the name of its run, its index in that run, and its index in the reference.
Place = tuple[Call, str, int, int]


def _has_calls(cell: Cell, driver: type[Driver]) -> str | None:
    if driver.walk_calls is None:
        return "the driver declares no calls"
    return None if cell.option("model") == "mlp" else "walks freeze and add layers of the model mlp"


# No check of the registry: its runs are drawn, see ``engine.run_check``. The scenario says how many ranks they have.
@check(scenario=TRAIN, until=(), order=95, not_applicable=_has_calls)
def walk(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a live trainer does what one process does, in whatever order its user calls it.

    Walks that failed once are replayed, new ones are drawn; the first that fails is shrunk. Observers (unwrap, state dict,
    evaluate) must change no bit. After each call names, dtypes, shards, modes, losses and parameters are compared.

    If it fails: repeat the walk alone (``distcompat walk --calls``), or run the script that it prints.
    """
    for name, run in trace.runs.items():
        if name.endswith("-reference"):
            sound, wrong = findings(cell, trace, name)
            calls = ", ".join(str(place[0]) for place in _places(run)[: sound + 1])
            yield from (f"{calls}: {text}" for text in wrong)


def findings(cell: Cell, trace: Trace, reference: str) -> tuple[int, list[str]]:
    """Return after how many calls of a walk all was well, and what is wrong after the next one; nothing if all is well."""
    number, places = 0, _places(trace.runs[reference])
    for number, place in enumerate(places):
        if wrong := list(dict.fromkeys(_after(cell, trace, reference, place))):
            return number, wrong
    end = trace.runs[reference].end
    return len(places), [f"the reference: {end.message}"] if end else []


def _places(reference: RunTrace) -> list[Place]:
    """Return where each call of a walk is; the reference of a run that failed may lack the last ones."""
    found: list[Place] = []
    number, index = 0, 1
    actions = {snapshot.index: snapshot.action for snapshot in reference.snapshots}
    for place, text in sorted(actions.items()):
        if text.startswith(REFERENCE_CALL):
            call = Call.parse(text.removeprefix(REFERENCE_CALL))
            # The first action of the next process group that is compared is its load.
            number, index = (number + 1, 2) if call.name == RESUME else (number, index + 1)
            found.append((call, reference.name.replace("reference", str(number)), index, place))
    return found


def _after(cell: Cell, trace: Trace, reference: str, place: Place) -> Iterator[str]:
    """Yield what is wrong after one call."""
    call, name, index, number = place
    run = trace.runs[name]
    here, there = run.at_index(index), trace.runs[reference].at_index(number)
    if run.end is not None and len(here) < run.world_size:
        # Without the rank: it is chance which one raises first.
        yield f"{call}: {run.end.kind}: {run.end.message.partition(' raised ')[2] or run.end.message}"
        return
    before = {snapshot.rank: snapshot for snapshot in run.at_index(index - 1)}
    # A trainer that loads may wrap the model only then.
    first = trace.runs[reference.replace("reference", "0")]
    assert run.unwrapped is not None
    built, names = {snapshot.rank: snapshot for snapshot in first.at("build")}, Names(run, run.unwrapped)
    found: dict[str, list[int]] = defaultdict(list)
    for snapshot in here:
        quiet = call.name in _QUIET or (snapshot.call and snapshot.call.observes)
        for text in (
            *(_changed(before[snapshot.rank], snapshot) if quiet else ()),
            *_structure(built[snapshot.rank], snapshot),
            *_unlike(names, snapshot, there[0]),
            *_numbers(cell, call, snapshot, there[0]),
        ):
            found[text].append(snapshot.rank)
    yield from (f"{call}: {named_ranks(ranks, run.world_size)}: {text}" for text, ranks in found.items())
    others = (*_loss(cell, call, here, there[0]), *_values(cell, names, here, there[0]))
    yield from (f"{call}: {text}" for text in others)


def _changed(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield what a call changed that was to change nothing, bit by bit."""
    if before.optimizer and after.optimizer:
        # Which parameters had no gradient is known of steps only. A fresh optimizer may get its state: its next step is compared.
        states = after.optimizer.states if before.optimizer.states else ()
        optimizer = dataclasses.replace(after.optimizer, without_gradient=(), states=states)
        after = dataclasses.replace(after, optimizer=optimizer)
        before = dataclasses.replace(before, optimizer=dataclasses.replace(before.optimizer, without_gradient=()))
    for what in ("optimizer", "scheduler", "rng", "scaler"):
        if getattr(before, what) != getattr(after, what):
            yield f"the {what} changed{_first(getattr(before, what), getattr(after, what))}"
    for what in ("parameters", "buffers"):
        was, now = ({info.name: info for info in getattr(one, what)} for one in (before, after))
        yield from _one(f"{what} changed", was, now)
    if before.call and after.call:
        old, new = before.call, after.call
        yield from _one("gradients changed", old.gradients, {name: new.gradients.get(name) for name in old.gradients})
        if old.evaluating != new.evaluating:
            yield f"{len(new.evaluating)} modules are in evaluation mode; {len(old.evaluating)} were"


def _structure(built: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield what is not as it was built: names, kinds, shapes, dtypes and shards of parameters."""
    was, now = (
        {info.name: (info.kind, info.shape, info.dtype, info.layout, info.local_numel) for info in one.parameters}
        for one in (built, after)
    )
    yield from _one("parameters are not as built", was, now)


def _unlike(names: Names, here: Snapshot, there: Snapshot) -> Iterator[str]:
    """Yield what is not as in the reference, exactly: what is trainable, in the optimizer, its numbers, buffers, modes."""
    expected = {info.name: info for info in there.parameters}
    found = {names(info.name): info for info in here.parameters if info.kind != "FlatParameter"}
    was = {name: expected[name].trainable if name in expected else None for name in found}
    yield from _one("not trainable as in the reference", was, {name: info.trainable for name, info in found.items()})
    held = {name: info.held for name, info in found.items() if info.held is not None and name in expected}
    yield from _one("not in the optimizer as in the reference", {name: expected[name].held for name in held}, held)
    if here.optimizer and there.optimizer:
        rates = [sorted({f"{group.get('lr', 0):.6g}" for group in one.param_groups}) for one in (here, there)]
        if rates[0] != rates[1]:
            yield f"the learning rates are {', '.join(rates[0])}; {', '.join(rates[1])} in the reference"
    old, new = ({names(info.name): info.digest for info in one.buffers} for one in (there, here))
    yield from _one("buffers are not the reference's", {name: old.get(name) for name in new}, new)
    if here.call and there.call and bool(here.call.evaluating) != bool(there.call.evaluating):
        yield f"{len(here.call.evaluating)} modules are in evaluation mode; {len(there.call.evaluating)} in the reference"


def _loss(cell: Cell, call: Call, here: Sequence[Snapshot], there: Snapshot) -> Iterator[str]:
    losses = [one.loss for one in here if one.loss is not None]
    if losses and there.loss is not None and call.name in {"step", "micro"}:
        loss = sum(losses) / len(losses)
        if not abs(loss - there.loss) <= 2 * PRECISIONS.get(cell.precision).loss_tolerance * abs(there.loss):
            yield f"the loss is {loss:.6g}; {there.loss:.6g} in the reference"


def _numbers(cell: Cell, call: Call, here: Snapshot, there: Snapshot) -> Iterator[str]:
    """Yield how gradient norm and outputs are off."""
    precision = PRECISIONS.get(cell.precision)
    clips = call.name == "step" and "clip" not in dict(call.arguments)
    if clips and here.grad_norm is not None and there.grad_norm:
        off = abs(here.grad_norm - there.grad_norm)
        if not off <= 2 * precision.norm_tolerance * there.grad_norm:
            yield f"the gradient norm is {here.grad_norm:.6g}; {there.grad_norm:.6g} in the reference"
    largest = max(map(abs, there.outputs), default=0.0)
    off = max((abs(a - b) for a, b in zip(here.outputs, there.outputs, strict=False)), default=0.0)
    if not off <= 10 * precision.loss_tolerance * largest:
        yield f"outputs are up to {off:.2g} off the reference's, which are up to {largest:.2g}"


def _values(cell: Cell, names: Names, here: Sequence[Snapshot], there: Snapshot) -> Iterator[str]:
    """Yield the parameters and buffers, live or returned, that are not the reference's, and those that were not returned."""
    expected = there.call.sums if there.call else {}
    tolerance = TOLERANCE if PRECISIONS.get(cell.precision).compute == "float32" else ROUNDED_TOLERANCE
    calls = [snapshot.call for snapshot in here if snapshot.call]
    live = [{names(name): sums for name, sums in one.sums.items()} for one in calls]
    yield from _off(names, live, expected, tolerance, "parameters are not the reference's")
    # Of gradients and moments the reference returns its own. Only some ranks return anything, such as one that writes a file.
    if there.call and there.call.returned is not None:
        expected, tolerance = there.call.returned, 2 * PRECISIONS.get(cell.precision).norm_tolerance
    returned = [{names(name): sums for name, sums in one.returned.items()} for one in calls if one.returned]
    known = [{name: sums for name, sums in one.items() if name in expected} for one in returned]
    yield from _off(names, known, expected, tolerance, "what it returned is not the reference's")
    trained = [info.name for info in there.parameters if info.trainable and info.name in expected]
    if returned and (lacking := [repr(name) for name in trained if not any(name in one for one in known)]):
        yield f"what it returned lacks {', '.join(lacking)}"


def _off(
    names: Names, held: Sequence[Mapping[str, Sums]], expected: Mapping[str, Sums], tolerance: float, what: str
) -> Iterator[str]:
    """Yield what is off of tensors that the ranks hold whole or, together, in parts."""
    wrong = {}
    for name in dict.fromkeys(name for one in held for name in one):
        parts = [one[name] for one in held if name in one]
        whole = (sum(one[0] for one in parts), sum(one[1] for one in parts), sum(one[2] for one in parts))
        for sums in [whole] if whole[0] == names.sizes.get(name) else parts:
            if name not in expected or not _close(sums, expected[name], tolerance):
                wrong[name] = sums
    yield from _one(what, expected, wrong, [*wrong])


def _close(found: Sums, expected: Sums, tolerance: float) -> bool:
    """Tell whether sums are as close as the tolerance says, relative to the largest sum that such elements can have."""
    scale = math.sqrt(expected[0] * expected[2])
    return (
        found[0] == expected[0]
        and abs(found[1] - expected[1]) <= tolerance * max(scale, 1e-3)
        and abs(found[2] - expected[2]) <= 2 * tolerance * max(expected[2], 1e-3)
    )


def _one(
    what: str, was: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str] | None = None
) -> Iterator[str]:
    """Yield one finding for all the names, by default those whose values differ."""
    if names is None:
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    if names:
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        yield f"{what}: {names[0]!r}{others}{_first(was.get(names[0]), now.get(names[0]))}"


def _first(was: Any, now: Any) -> str:
    """Return the first field in which two records differ, in words; nothing for long ones."""
    for name in getattr(was, "__dataclass_fields__", ()):
        if getattr(was, name, None) != getattr(now, name, None):
            return f": {name}" + _first(getattr(was, name), getattr(now, name, None))
    text = f": {now!r}; expected {was!r}"
    return text if len(text) < 160 else ""
