"""Does a trainer do what one process does, whatever its user calls in whatever order?

A walk is a sequence of calls of a live trainer. Its runs are called ``walk-3-0``, ``walk-3-1``, ...
(a new process group after each load of a checkpoint), and ``walk-3-reference`` is the same sequence
in one process, on the unwrapped model.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.calls import REFERENCE_CALL, RESUME, Call
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import Names, named_ranks
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.trace import (
    CallInfo,
    ParameterInfo,
    RunTrace,
    Snapshot,
    Sums,
    Trace,
    shard_groups,
)

#: How far sums of parameters may be from the reference's, relative to the largest possible.
TOLERANCE = 1e-5
#: The same where products are computed in fewer bits than float32.
ROUNDED_TOLERANCE = 5e-2
#: The calls that change no bit of what is trained, though they are no observers.
_QUIET = frozenset({"skip", "new_epoch"})
#: Fields of a snapshot that such a call leaves as they are, besides parameters, buffers and
#: gradients.
_UNCHANGED_FIELDS = ("optimizer", "scheduler", "rng", "scaler")
#: The longest text of a difference that a finding shows.
_LONGEST_DIFFERENCE = 160


def walk(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a live trainer does what one process does, in whatever order its user calls it.

    Walks that failed once are replayed, new ones are drawn; the first that fails is shrunk.
    Observers (unwrap, state dict, evaluate) must change no bit. After each call names, dtypes,
    shards, modes, losses and parameters are compared.

    If it fails: repeat the walk alone (``distcompat walk --calls``), or run the script that it
    prints.
    """
    for name, run in trace.runs.items():
        if not name.endswith("-reference"):
            continue
        passed, problems = findings(cell, trace, name)
        walked = _recorded_calls(run)[: passed + 1]
        calls = [str(recorded.call) for recorded in walked]
        for problem in problems:
            yield f"{', '.join(calls)}: {problem}"


def findings(cell: Cell, trace: Trace, reference: str) -> tuple[int, list[str]]:
    """Compare a walk with its reference, call by call, until they differ.

    Args:
        cell: The cell of the walk.
        trace: A trace that has the runs of the walk.
        reference: The name of the reference's run.

    Returns:
        The number of calls after which the walk was equal to its reference, and the findings after
        the next call: none if the whole walk was equal.
    """
    reference_run = trace.runs[reference]
    calls = _recorded_calls(reference_run)
    for passed, recorded in enumerate(calls):
        # A dict, because it keeps the order and has each finding only once.
        problems: dict[str, None] = {}
        for text in _after_call(cell, trace, reference, recorded):
            problems[f"{recorded.call}: {text}"] = None
        if problems:
            return passed, list(problems)
    if reference_run.end is not None:
        return len(calls), [f"the reference: {reference_run.end.message}"]
    return len(calls), []


@dataclass(frozen=True)
class _RecordedCall:
    """Place of a call's snapshots in a trace.

    Attributes:
        call: The call.
        run: The name of the walk's run that makes it.
        index: Its index in that run.
        reference_index: Its index in the run of the reference.
    """

    call: Call
    run: str
    index: int
    reference_index: int


def _recorded_calls(reference: RunTrace) -> list[_RecordedCall]:
    """Return the calls that the reference made, in order.

    If the reference failed, the last calls of the walk may be missing.
    """
    actions = {snapshot.index: snapshot.action for snapshot in reference.snapshots}
    calls: list[_RecordedCall] = []
    process_group = 0
    index = 1
    for reference_index, action in sorted(actions.items()):
        if not action.startswith(REFERENCE_CALL):
            continue
        call = Call.parse(action.removeprefix(REFERENCE_CALL))
        if call.name == RESUME:
            # The first action of the next process group that is compared is its load.
            process_group += 1
            index = 2
        else:
            index += 1
        run = reference.name.replace("reference", str(process_group))
        calls.append(_RecordedCall(call, run, index, reference_index))
    return calls


def _after_call(cell: Cell, trace: Trace, reference: str, recorded: _RecordedCall) -> Iterator[str]:
    """Yield how the trainer differs from the reference after a call."""
    call = recorded.call
    run = trace.runs[recorded.run]
    snapshots = run.at_index(recorded.index)
    reference_snapshots = trace.runs[reference].at_index(recorded.reference_index)
    if run.end is not None and len(snapshots) < run.world_size:
        # Without the rank: it is chance which one raises first.
        _, _, exception = run.end.message.partition(" raised ")
        message = exception or run.end.message
        yield f"{run.end.kind}: {message}"
        return
    assert run.unwrapped is not None
    names = Names(run, run.unwrapped)
    # A trainer that loads may wrap the model only then, so a later run is compared with the build
    # of the first.
    first_run = trace.runs[reference.replace("reference", "0")]
    built = _by_rank(first_run.at("build"))
    before = _by_rank(run.at_index(recorded.index - 1))
    expected = reference_snapshots[0]
    ranks_by_finding: dict[str, list[int]] = defaultdict(list)
    for snapshot in snapshots:
        texts: list[str] = []
        if _must_change_nothing(call, snapshot):
            texts += _changes(before[snapshot.rank], snapshot)
        texts += _structure_changes(built[snapshot.rank], snapshot)
        texts += _differences(names, snapshot, expected)
        texts += _inexact_numbers(cell, call, snapshot, expected)
        for text in texts:
            ranks_by_finding[text].append(snapshot.rank)
    for text, ranks in ranks_by_finding.items():
        where = named_ranks(ranks, run.world_size)
        yield f"{where}: {text}"
    yield from _inexact_loss(cell, call, snapshots, expected)
    yield from _inexact_live_values(cell, names, snapshots, expected)
    yield from _inexact_returned_values(cell, names, snapshots, expected)


def _by_rank(snapshots: Iterable[Snapshot]) -> dict[int, Snapshot]:
    return {snapshot.rank: snapshot for snapshot in snapshots}


def _must_change_nothing(call: Call, snapshot: Snapshot) -> bool:
    """Tell whether the call leaves the trainer as it is, bit by bit."""
    if call.name in _QUIET:
        return True
    return snapshot.call is not None and snapshot.call.observes


def _changes(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield what a call changed that was to change nothing, bit by bit."""
    before, after = _without_step_records(before, after)
    for name in _UNCHANGED_FIELDS:
        old = getattr(before, name)
        new = getattr(after, name)
        if old != new:
            yield f"the {name} changed{_first_difference(old, new)}"
    parameters = _by_name(before.parameters)
    yield from _differing("parameters changed", parameters, _by_name(after.parameters))
    buffers = _by_name(before.buffers)
    yield from _differing("buffers changed", buffers, _by_name(after.buffers))
    if before.call and after.call:
        yield from _changes_of_gradients_and_modes(before.call, after.call)


def _changes_of_gradients_and_modes(before: CallInfo, after: CallInfo) -> Iterator[str]:
    """Yield the gradients that a call changed, and how many modules are in evaluation mode."""
    gradients_after = _values_of(before.gradients, after.gradients)
    yield from _differing("gradients changed", before.gradients, gradients_after)
    if before.evaluating != after.evaluating:
        evaluating = f"{len(after.evaluating)} modules are in evaluation mode"
        yield f"{evaluating}; {len(before.evaluating)} were"


def _without_step_records(before: Snapshot, after: Snapshot) -> tuple[Snapshot, Snapshot]:
    """Return both snapshots without the fields of the optimizer that only steps define."""
    if before.optimizer is None or after.optimizer is None:
        return before, after
    # Which parameters had no gradient is known of steps only.
    old = dataclasses.replace(before.optimizer, without_gradient=())
    new = dataclasses.replace(after.optimizer, without_gradient=())
    if not old.states:
        # A fresh optimizer may get its state: its next step is compared.
        new = dataclasses.replace(new, states=())
    return dataclasses.replace(before, optimizer=old), dataclasses.replace(after, optimizer=new)


def _by_name(infos: Iterable[ParameterInfo]) -> dict[str, ParameterInfo]:
    return {info.name: info for info in infos}


def _structure_changes(built: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield what is not as it was built: names, kinds, shapes, dtypes and shards of parameters."""
    yield from _differing("parameters are not as built", _structure(built), _structure(after))


def _structure(snapshot: Snapshot) -> dict[str, Any]:
    """Return, by live name, what a call must never change of a parameter."""
    structure: dict[str, Any] = {}
    for info in snapshot.parameters:
        structure[info.name] = (
            info.kind,
            info.shape,
            info.dtype,
            info.layout,
            info.local_numel,
        )
    return structure


def _differences(names: Names, snapshot: Snapshot, reference: Snapshot) -> Iterator[str]:
    """Yield what is not exactly as in the reference.

    Compared are what is trainable, what is in the optimizer, learning rates, buffers and modes.
    """
    yield from _parameter_differences(names, snapshot, reference)
    if snapshot.optimizer and reference.optimizer:
        rates = _learning_rates(snapshot)
        expected_rates = _learning_rates(reference)
        if rates != expected_rates:
            yield _unlike_reference(f"the learning rates are {rates}", expected_rates)
    reference_buffers = _digests(names, reference.buffers)
    buffers = _digests(names, snapshot.buffers)
    expected_buffers = _values_of(buffers, reference_buffers)
    yield from _differing("buffers are not the reference's", expected_buffers, buffers)
    if snapshot.call and reference.call:
        evaluating = len(snapshot.call.evaluating)
        expected_evaluating = len(reference.call.evaluating)
        if bool(evaluating) != bool(expected_evaluating):
            count = f"{evaluating} modules are in evaluation mode"
            yield _unlike_reference(count, str(expected_evaluating))


def _unlike_reference(actual: str, expected: str) -> str:
    """Return the finding that something is not as in the reference.

    Args:
        actual: What it is: ``the loss is 0.4``.
        expected: What it is in the reference: ``0.3``.
    """
    return f"{actual}; {expected} in the reference"


def _digests(names: Names, infos: Iterable[ParameterInfo]) -> dict[str, str]:
    """Return the digests of tensors, by unwrapped name."""
    digests: dict[str, str] = {}
    for info in infos:
        digests[names(info.name)] = info.digest
    return digests


def _parameter_differences(names: Names, snapshot: Snapshot, reference: Snapshot) -> Iterator[str]:
    """Yield the parameters that are not trainable, or not in the optimizer, as in the reference."""
    expected_by_name = _by_name(reference.parameters)
    live: dict[str, ParameterInfo] = {}
    for info in snapshot.parameters:
        if info.kind != "FlatParameter":
            live[names(info.name)] = info
    trainable: dict[str, bool] = {}
    expected_trainable: dict[str, bool | None] = {}
    entries: dict[str, int] = {}
    expected_entries: dict[str, int | None] = {}
    for name, info in live.items():
        trainable[name] = info.trainable
        expected = expected_by_name.get(name)
        if expected is None:
            expected_trainable[name] = None
            continue
        expected_trainable[name] = expected.trainable
        # ZeRO's optimizers hold flat copies instead (None).
        if info.held is not None:
            entries[name] = info.held
            expected_entries[name] = expected.held
    yield from _differing("not trainable as in the reference", expected_trainable, trainable)
    yield from _differing("not in the optimizer as in the reference", expected_entries, entries)


def _learning_rates(snapshot: Snapshot) -> str:
    """Return the different learning rates of the optimizer's groups, as findings show them."""
    rates: set[str] = set()
    for group in snapshot.param_groups:
        rate = group.get("lr", 0)
        rates.add(f"{rate:.6g}")
    return ", ".join(sorted(rates))


def _inexact_loss(
    cell: Cell, call: Call, snapshots: Sequence[Snapshot], reference: Snapshot
) -> Iterator[str]:
    """Yield a finding if the mean of the ranks' losses is not the reference's loss.

    It may be off by twice the tolerance of the precision.
    """
    losses = [snapshot.loss for snapshot in snapshots if snapshot.loss is not None]
    if not losses or reference.loss is None or call.name not in {"step", "micro"}:
        return
    loss = sum(losses) / len(losses)
    tolerance = 2 * PRECISIONS.get(cell.precision).loss_tolerance
    allowed = tolerance * abs(reference.loss)
    # Not ``>``, which is false for NaN; so everywhere below.
    if not abs(loss - reference.loss) <= allowed:
        yield _unlike_reference(f"the loss is {loss:.6g}", f"{reference.loss:.6g}")


def _inexact_numbers(
    cell: Cell, call: Call, snapshot: Snapshot, reference: Snapshot
) -> Iterator[str]:
    """Yield a finding each if the gradient norm or the outputs are too far from the reference's.

    How far they may be depends on the precision.
    """
    precision = PRECISIONS.get(cell.precision)
    clips = call.name == "step" and "clip" not in dict(call.arguments)
    if clips and snapshot.grad_norm is not None and reference.grad_norm:
        distance = abs(snapshot.grad_norm - reference.grad_norm)
        if not distance <= 2 * precision.norm_tolerance * reference.grad_norm:
            norm = f"the gradient norm is {snapshot.grad_norm:.6g}"
            yield _unlike_reference(norm, f"{reference.grad_norm:.6g}")
    largest = max(map(abs, reference.outputs), default=0.0)
    outputs = zip(snapshot.outputs, reference.outputs, strict=False)
    distances = [abs(output - reference_output) for output, reference_output in outputs]
    furthest = max(distances, default=0.0)
    if not furthest <= 10 * precision.loss_tolerance * largest:
        yield f"outputs are up to {furthest:.2g} off the reference's, which are up to {largest:.2g}"


def _inexact_live_values(
    cell: Cell, names: Names, snapshots: Sequence[Snapshot], reference: Snapshot
) -> Iterator[str]:
    """Yield a finding for the live parameters and buffers that are not the reference's."""
    expected: Mapping[str, Sums] = {}
    if reference.call:
        expected = reference.call.sums
    live_by_rank: dict[int, dict[str, Sums]] = {}
    for snapshot in snapshots:
        if snapshot.call:
            live_by_rank[snapshot.rank] = _by_unwrapped_name(names, snapshot.call.sums)
    title = "parameters are not the reference's"
    tensors = _wholes(names, snapshots, live_by_rank)
    yield from _inexact_sums(title, tensors, expected, _tolerance_of_sums(cell))


def _inexact_returned_values(
    cell: Cell, names: Names, snapshots: Sequence[Snapshot], reference: Snapshot
) -> Iterator[str]:
    """Yield what a call returned that is not the reference's, or did not return.

    It may return nothing; otherwise it is to return all trained parameters.
    """
    expected: Mapping[str, Sums] = {}
    tolerance = _tolerance_of_sums(cell)
    if reference.call:
        expected = reference.call.sums
        # Of gradients and moments the reference returns its own.
        if reference.call.returned is not None:
            expected = reference.call.returned
            tolerance = 2 * PRECISIONS.get(cell.precision).norm_tolerance
    known_by_rank: dict[int, dict[str, Sums]] = {}
    known_names: set[str] = set()
    for snapshot in snapshots:
        # Only some ranks return anything, such as one that writes a file.
        if snapshot.call is None or not snapshot.call.returned:
            continue
        returned = _by_unwrapped_name(names, snapshot.call.returned)
        known = {name: sums for name, sums in returned.items() if name in expected}
        known_by_rank[snapshot.rank] = known
        known_names.update(known)
    if not known_by_rank:
        return
    title = "what it returned is not the reference's"
    tensors = _wholes(names, snapshots, known_by_rank)
    yield from _inexact_sums(title, tensors, expected, tolerance)
    lacking: list[str] = []
    for info in reference.parameters:
        is_expected = info.trainable and info.name in expected
        if is_expected and info.name not in known_names:
            lacking.append(repr(info.name))
    if lacking:
        yield f"what it returned lacks {', '.join(lacking)}"


def _tolerance_of_sums(cell: Cell) -> float:
    """Return how far sums of parameters may be from the reference's, relative to the largest."""
    if PRECISIONS.get(cell.precision).compute == "float32":
        return TOLERANCE
    return ROUNDED_TOLERANCE


def _by_unwrapped_name(names: Names, sums_by_live_name: Mapping[str, Sums]) -> dict[str, Sums]:
    return {names(live): sums for live, sums in sums_by_live_name.items()}


def _inexact_sums(
    title: str,
    sums_by_name: Mapping[str, Sequence[Sums]],
    expected: Mapping[str, Sums],
    tolerance: float,
) -> Iterator[str]:
    """Yield a finding for the tensors whose sums are not the expected ones.

    Args:
        title: How the finding begins.
        sums_by_name: The sums of each copy of a tensor, by unwrapped name.
        expected: The sums of the whole tensors.
        tolerance: How far they may be apart, relative to the largest possible sum.
    """
    inexact: dict[str, Sums] = {}
    for name, copies in sums_by_name.items():
        for sums in copies:
            if name not in expected or not _close(sums, expected[name], tolerance):
                inexact[name] = sums
    yield from _difference_of(title, expected, inexact, list(inexact))


def _wholes(
    names: Names, snapshots: Iterable[Snapshot], sums_by_rank: Mapping[int, Mapping[str, Sums]]
) -> dict[str, list[Sums]]:
    """Return the sums of each copy of a tensor, put together from its parts, by unwrapped name.

    What makes up no whole tensor is returned part by part.

    Args:
        names: The unwrapped model's names, with the number of elements of each.
        snapshots: The snapshots of all ranks, which tell which ranks hold a copy together.
        sums_by_rank: The sums of what each rank has, by unwrapped name: of whole tensors, or of
            parts that are whole together.
    """
    parts_by_name: dict[str, dict[int, Sums]] = defaultdict(dict)
    for rank, rank_sums in sums_by_rank.items():
        for name, sums in rank_sums.items():
            parts_by_name[name][rank] = sums
    holders_by_name: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for snapshot in snapshots:
        for info in snapshot.parameters:
            holders_by_name[names(info.name)][snapshot.rank] = info.layout.holders
    wholes: dict[str, list[Sums]] = {}
    for name, parts in parts_by_name.items():
        wholes[name] = list(parts.values())
        # Masters of ZeRO-1 and ZeRO-2 are shards of all ranks, of which each has the parameter.
        for groups in (shard_groups(holders_by_name[name]), (tuple(parts),)):
            totals = _totals(parts, groups)
            if totals and all(numel == names.sizes.get(name) for numel, _, _ in totals):
                wholes[name] = totals
                break
    return wholes


def _totals(parts: Mapping[int, Sums], groups: Iterable[Sequence[int]]) -> list[Sums]:
    """Return the sums of the parts of each group of ranks that has any."""
    totals: list[Sums] = []
    for ranks in groups:
        parts_of_group = [parts[rank] for rank in ranks if rank in parts]
        if parts_of_group:
            totals.append(_total(parts_of_group))
    return totals


def _total(parts: Sequence[Sums]) -> Sums:
    """Return the sums of a tensor from those of its parts."""
    numels, elements, squares = zip(*parts, strict=True)
    return sum(numels), sum(elements), sum(squares)


def _close(actual: Sums, expected: Sums, tolerance: float) -> bool:
    """Tell whether sums are as close as the tolerance says.

    It is relative to the largest sum that elements with the expected squares can have.
    """
    numel, elements, squares = actual
    expected_numel, expected_elements, expected_squares = expected
    if numel != expected_numel:
        return False
    # By the Cauchy-Schwarz inequality no sum of that many elements with these squares is larger.
    largest_sum = math.sqrt(expected_numel * expected_squares)
    distance = abs(elements - expected_elements)
    if not distance <= tolerance * max(largest_sum, 1e-3):
        return False
    distance_of_squares = abs(squares - expected_squares)
    return distance_of_squares <= 2 * tolerance * max(expected_squares, 1e-3)


#: What is compared, by name.
_Values = Mapping[str, Any]


def _values_of(names: Iterable[str], values: _Values) -> _Values:
    """Return the values of these names only, None for a name without one."""
    return {name: values.get(name) for name in names}


def _differing(title: str, before: _Values, after: _Values) -> Iterator[str]:
    """Yield a finding for the names whose values differ, or that only one of both has."""
    differing: list[str] = []
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            differing.append(name)
    yield from _difference_of(title, before, after, differing)


def _difference_of(
    title: str, before: _Values, after: _Values, names: Sequence[str]
) -> Iterator[str]:
    """Yield one finding for all the names, with how the values of the first differ.

    Without names there is none.
    """
    if not names:
        return
    first = names[0]
    others = ""
    if len(names) > 1:
        others = f" and {len(names) - 1} others"
    difference = _first_difference(before.get(first), after.get(first))
    yield f"{title}: {first!r}{others}{difference}"


def _first_difference(before: Any, after: Any) -> str:
    """Return the first field in which two records differ, in words; nothing for long ones."""
    for name in getattr(before, "__dataclass_fields__", ()):
        old = getattr(before, name, None)
        new = getattr(after, name, None)
        if old != new:
            return f": {name}{_first_difference(old, new)}"
    text = f": {after!r}; expected {before!r}"
    if len(text) >= _LONGEST_DIFFERENCE:
        return ""
    return text
