"""Check ``scaling``: the loss of float16 is scaled, and all ranks skip a step that overflows.

Small gradients vanish in float16, so a trainer multiplies the loss by a scale such as 65536. If
gradients overflow, it must skip the step on all ranks and make the scale smaller.

``judge.judge`` calls the check once the run ``overflow`` (one process group from start to end) has
ended. It gets a cell, one point of the test matrix such as ``fsdp1-fp16_mixed-w2``, and the trace
of that run: a step, a step in which the gradients of one rank are made infinite (action
``overflow``), and a step. For each rank and action there is a snapshot with the numbers of the
scaler (``{"scale": 65536.0}``), and with digests (hashes) of parameters and optimizer state. The
check yields findings, such as ``rank 0: 'lm_head.weight' changed in a step whose gradients
overflow; expected it to be skipped``.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell does not have the check, or None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, pairs
from pytest_distcompat.driver import Driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import OVERFLOW
from pytest_distcompat.trace import Snapshot, Trace


def _not_scaled(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the cell does not have the check; None if it does."""
    if not PRECISIONS.get(cell.precision).scaled:
        return f"{cell.precision} needs no scaled loss"
    if cell.option("compile"):
        return "a hook that makes gradients overflow would break the graph that compile is to see"
    if not driver.can("overflow"):
        return "the driver has no overflow(): no gradients can be made to"
    return None


@check(
    scenario=OVERFLOW,
    until=(("overflow", "step", 0), ("overflow", "overflow", 0), ("overflow", "step", 1)),
    order=17,
    not_applicable=_not_scaled,
)
def scaling(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the loss is scaled, and that all ranks skip a step in which gradients overflow.

    If one rank's gradients of one layer are infinite, no rank changes a parameter, a master or
    state, and every scale shrinks, unless DeepSpeed's ``hysteresis`` tolerates more overflows. In
    the next step all ranks train.

    If it fails: without a scaler gradients below 6e-8 are zero
    (https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling). One that reads its own rank's
    gradients only lets some ranks step (https://github.com/deepspeedai/DeepSpeed/pull/7580): use
    ShardedGradScaler for FSDP1.
    """
    run = trace.run("overflow")
    before = run.at("step", 0)
    corrupted = run.at("overflow")
    after = run.at("step", 1)
    # Findings for ranks without a snapshot.
    yield from every_rank(before, cell.world_size, "the first step")
    yield from every_rank(corrupted, cell.world_size, "the step that overflows")
    yield from every_rank(after, cell.world_size, "the step after the overflow")
    for snapshot in before:
        yield from _wrong_scale(snapshot)
    yield from _unlike_scales(before, "the first step")
    yield from _unlike_scales(corrupted, "the overflow")
    yield from _unlike_scales(after, "the step after it")
    # Two snapshots of one rank.
    for snapshot_before, snapshot in pairs(before, corrupted):
        yield from _not_skipped(snapshot_before, snapshot)
        yield from _not_shrunk(snapshot_before, snapshot)
    for snapshot_before, snapshot in pairs(corrupted, after):
        # A rank without optimizer state may hold no element of the model, so nothing can change.
        trained_before = _trained_digests(snapshot_before)
        if snapshot.states and trained_before == _trained_digests(snapshot):
            yield (
                f"rank {snapshot.rank}: nothing changed in the step after the overflow; "
                "expected training to go on"
            )


def _wrong_scale(snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding if the loss is not scaled, or by no number that can help."""
    rank = f"rank {snapshot.rank}"
    scale = snapshot.scaler.get("scale")
    if scale is None:
        yield f"{rank}: nothing scales the loss; small gradients vanish in float16"
    elif scale <= 1:
        yield f"{rank}: the loss is scaled by {scale:g}; expected more than 1"
    elif not math.isfinite(scale):
        yield f"{rank}: the loss is scaled by {scale:g}; expected a finite number"


def _unlike_scales(snapshots: Sequence[Snapshot], moment: str) -> Iterator[str]:
    """Yield a finding if ranks scale the loss by different numbers; ``moment`` says when."""
    scales = set()
    for snapshot in snapshots:
        if "scale" in snapshot.scaler:
            scales.add(snapshot.scaler["scale"])
    if len(scales) > 1:
        texts = [f"{scale:g}" for scale in sorted(scales)]
        listed = ", ".join(texts)
        yield f"ranks scale the loss differently after {moment}: by {listed}"


def _not_skipped(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield a finding if a rank changed values in the step that must be skipped."""
    digests = _trained_digests(before)
    digests_after = _trained_digests(after)
    changed: list[str] = []
    for name in sorted(digests | digests_after):
        if digests.get(name) != digests_after.get(name):
            changed.append(name)
    if not changed:
        return
    names = changed[0]
    others = len(changed) - 1
    if others:
        names += f" and {others} others"
    yield (
        f"rank {after.rank}: {names} changed in a step whose gradients overflow; "
        "expected it to be skipped"
    )


def _not_shrunk(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield a finding if the step that overflows did not make a rank's scale smaller."""
    scale = before.scaler.get("scale")
    scale_after = after.scaler.get("scale")
    if scale is None or scale_after is None:
        return
    # DeepSpeed's hysteresis is how many overflows it tolerates before it makes the scale smaller:
    # https://www.deepspeed.ai/docs/config-json/#fp16-training-options.
    tolerated = before.scaler.get("hysteresis", 1.0)
    tolerated_after = after.scaler.get("hysteresis", 1.0)
    is_tolerated = tolerated_after < tolerated
    if scale_after >= scale and not is_tolerated:
        text = f"the scale is {scale_after:g} after an overflow at {scale:g}"
        yield f"rank {after.rank}: {text}; expected a smaller one"


def _trained_digests(snapshot: Snapshot) -> dict[str, str]:
    """Return the digests of all tensors that a step changes: ``exp_avg of 'head'`` -> digest."""
    digests = {repr(info.name): info.digest for info in snapshot.parameters}
    for state in snapshot.states:
        words = f"{state.key} of {state.owner!r}"
        digests[words] = state.digest
    return digests
