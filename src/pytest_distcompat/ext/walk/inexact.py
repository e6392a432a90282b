"""What may differ by rounding after a call of a walk: losses, norms, outputs, sums of parameters.

A *walk* makes the same sequence of calls on a live trainer, on several ranks (processes), and on a
*reference*: one process with the bare model. ``claim`` compares them after each call, by these
functions. Two trainers that add numbers in another order differ in the last digits, so each number
has a tolerance. What must be equal bit by bit is compared in ``exact``.

The input is *snapshots*, what was recorded in one rank after the call. Tensors are not in them,
only their *sums*: the number of elements, their sum, and the sum of their squares. The sums of the
*shards* (parts) that several ranks store add up to those of the whole tensor, so nothing is
gathered. A snapshot after a call has them as ``snapshot.call``: ``sums`` of all parameters and
buffers, and ``returned``, those of tensors that the call returned, ``{"inlet.weight": (1024, 3.1,
9.4)}``. ``names("module.inlet.weight")`` is the name in the *unwrapped* model, before DDP or FSDP
wraps it, and ``names.sizes`` has the number of elements of each such name.

The result is findings as text. A *cell* is what runs: strategy, precision, number of ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from pytest_distcompat.calls import Call
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import Names
from pytest_distcompat.ext.walk.difference_text import difference_of, unlike_reference
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.trace import Snapshot, Sums, shard_groups

#: How far sums of parameters may be from the reference's, relative to the largest possible sum.
TOLERANCE = 1e-5
#: The same in precisions that compute in fewer bits than float32.
ROUNDED_TOLERANCE = 5e-2
#: How many times the tolerances of a precision are allowed here. They were measured for the checks
#: of usual training, and a walk calls the trainer in unusual ways.
MARGIN = 2
#: The same for single outputs of the model, of which the loss is a mean.
OUTPUT_MARGIN = 10


def inexact_loss(
    cell: Cell, call: Call, snapshots: Sequence[Snapshot], reference: Snapshot
) -> Iterator[str]:
    """Yield a finding if the mean of the ranks' losses is not the reference's loss.

    It may be off by twice the tolerance of the cell's precision. Calls that do not train have no
    loss.
    """
    losses = [snapshot.loss for snapshot in snapshots if snapshot.loss is not None]
    if not losses or reference.loss is None or call.name not in {"step", "micro"}:
        return
    loss = sum(losses) / len(losses)
    tolerance = MARGIN * PRECISIONS.get(cell.precision).loss_tolerance
    allowed = tolerance * abs(reference.loss)
    # Not ``>``, which is false for NaN. All comparisons of this module are written like this one.
    if not abs(loss - reference.loss) <= allowed:
        yield unlike_reference(f"the loss is {loss:.6g}", f"{reference.loss:.6g}")


def inexact_numbers(
    cell: Cell, call: Call, snapshot: Snapshot, reference: Snapshot
) -> Iterator[str]:
    """Yield a finding each if the gradient norm or the outputs are too far from the reference's.

    Args:
        cell: Its precision decides how far they may be.
        call: The call.
        snapshot: The snapshot of one rank after the call.
        reference: The snapshot of the reference after the call.
    """
    precision = PRECISIONS.get(cell.precision)
    # Only a step that clips gradients by their norm reports the norm. That is the default; a call
    # ``step(clip='no')`` or ``step(clip='value')`` names what it does instead.
    clips = call.name == "step" and "clip" not in dict(call.arguments)
    if clips and snapshot.grad_norm is not None and reference.grad_norm:
        distance = abs(snapshot.grad_norm - reference.grad_norm)
        if not distance <= MARGIN * precision.norm_tolerance * reference.grad_norm:
            norm = f"the gradient norm is {snapshot.grad_norm:.6g}"
            yield unlike_reference(norm, f"{reference.grad_norm:.6g}")
    largest = max(map(abs, reference.outputs), default=0.0)
    # A rank has outputs only after a call that returns a tensor; else nothing is compared.
    outputs = zip(snapshot.outputs, reference.outputs, strict=False)
    distances = [abs(output - reference_output) for output, reference_output in outputs]
    furthest = max(distances, default=0.0)
    if not furthest <= OUTPUT_MARGIN * precision.loss_tolerance * largest:
        yield f"outputs are up to {furthest:.2g} off the reference's, which are up to {largest:.2g}"


def inexact_live_values(
    cell: Cell, names: Names, snapshots: Sequence[Snapshot], reference: Snapshot
) -> Iterator[str]:
    """Yield one finding for the live parameters and buffers that are not the reference's."""
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


def inexact_returned_values(
    cell: Cell, names: Names, snapshots: Sequence[Snapshot], reference: Snapshot
) -> Iterator[str]:
    """Yield how the tensors that a call returned differ from those of the reference.

    A call such as ``state_dict`` returns tensors, ``step`` returns nothing to compare. A call that
    returns tensors must return one for each trained parameter.
    """
    expected: Mapping[str, Sums] = {}
    tolerance = _tolerance_of_sums(cell)
    if reference.call:
        expected = reference.call.sums
        # For a call that returns gradients or moments of the optimizer, say, the reference returns
        # tensors too. Those of any other call are parameters, and are compared with its live ones.
        if reference.call.returned is not None:
            expected = reference.call.returned
            tolerance = MARGIN * PRECISIONS.get(cell.precision).norm_tolerance
    known_by_rank: dict[int, dict[str, Sums]] = {}
    known_names: set[str] = set()
    for snapshot in snapshots:
        # A call may return something on some ranks only: on the one that writes a file, say.
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
    yield from _lacking_parameters(reference, expected, known_names)


def _lacking_parameters(
    reference: Snapshot, expected: Collection[str], returned: Collection[str]
) -> Iterator[str]:
    """Yield a finding if a call that returned tensors lacks any trained parameter.

    Args:
        reference: The snapshot of the reference, which says what is trained.
        expected: The names of the tensors that the reference has to compare with.
        returned: The names of those that the call returned on any rank.
    """
    lacking: list[str] = []
    for info in reference.parameters:
        is_expected = info.trainable and info.name in expected
        if is_expected and info.name not in returned:
            lacking.append(repr(info.name))
    if lacking:
        yield f"what it returned lacks {', '.join(lacking)}"


def _tolerance_of_sums(cell: Cell) -> float:
    """Return how far sums of parameters may be from the reference's, relative to the largest."""
    if PRECISIONS.get(cell.precision).compute == "float32":
        return TOLERANCE
    return ROUNDED_TOLERANCE


def _by_unwrapped_name(names: Names, sums_by_live_name: Mapping[str, Sums]) -> dict[str, Sums]:
    """Return the sums by unwrapped name, as the reference has them."""
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
    # One finding that names them, with the sums of the first.
    yield from difference_of(title, expected, inexact, list(inexact))


def _wholes(
    names: Names, snapshots: Iterable[Snapshot], sums_by_rank: Mapping[int, Mapping[str, Sums]]
) -> dict[str, list[Sums]]:
    """Return the sums of each copy of a tensor, put together from its parts, by unwrapped name.

    A tensor in 2 shards on each of 2 replicas has two copies. A tensor whose parts do not add up to
    its number of elements is returned part by part; then the number of elements is the finding.

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
        holders = shard_groups(holders_by_name[name])
        wholes[name] = _copies(parts, holders, names.sizes.get(name))
    return wholes


def _copies(
    parts: Mapping[int, Sums], holders: Iterable[Sequence[int]], numel: int | None
) -> list[Sums]:
    """Return the sums of each copy of a tensor; those of its parts if they make up no whole tensor.

    Args:
        parts: Rank -> the sums of its part.
        holders: The ranks that hold a copy of the parameter together, for each copy: ``((0, 1),
            (2, 3))``.
        numel: The number of elements of the whole tensor; None if its name is unknown.
    """
    # Usually the parts of a copy are on these ranks. Under ZeRO-1 and ZeRO-2 each rank has the
    # whole parameter, and a shard of its master (the optimizer's float32 weights), whose sums these
    # are: there the parts of a copy are on all ranks.
    for groups in (holders, [tuple(parts)]):
        totals = _totals(parts, groups)
        if totals and all(total_numel == numel for total_numel, _, _ in totals):
            return totals
    return list(parts.values())


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
    # (The sum itself may be near 0, so a tolerance relative to it would say little.)
    largest_sum = math.sqrt(expected_numel * expected_squares)
    distance = abs(elements - expected_elements)
    if not distance <= tolerance * max(largest_sum, 1e-3):
        return False
    distance_of_squares = abs(squares - expected_squares)
    return distance_of_squares <= 2 * tolerance * max(expected_squares, 1e-3)
