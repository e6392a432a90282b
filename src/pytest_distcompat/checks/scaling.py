"""Does float16 train with a scaled loss, and do all ranks skip a step in which gradients overflow?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, pairs
from pytest_distcompat.driver import Driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import OVERFLOW
from pytest_distcompat.trace import Snapshot, Trace


def _not_scaled(cell: Cell, driver: type[Driver]) -> str | None:
    if not PRECISIONS.get(cell.precision).scaled:
        return f"{cell.precision} needs no scaled loss"
    if cell.option("compile"):
        return "a hook that makes gradients overflow would break the graph that compile is to see"
    return None if driver.can("overflow") else "the driver has no overflow(): no gradients can be made to"


@check(
    scenario=OVERFLOW,
    until=(("overflow", "step", 0), ("overflow", "overflow", 0), ("overflow", "step", 1)),
    order=17,
    not_applicable=_not_scaled,
)
def scaling(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the loss is scaled, and that all ranks skip a step in which gradients overflow.

    If one rank's gradients of one layer are infinite, no rank changes a parameter, a master or state, and every scale
    shrinks, unless DeepSpeed's ``hysteresis`` tolerates more overflows. In the next step all ranks train.

    If it fails: without a scaler gradients below 6e-8 are zero
    (https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling). One that reads its own rank's gradients only lets
    some ranks step (https://github.com/deepspeedai/DeepSpeed/pull/7580): use ShardedGradScaler for FSDP1.
    """
    run = trace.run("overflow")
    before, corrupted, after = run.at("step", 0), run.at("overflow"), run.at("step", 1)
    yield from every_rank(before, cell.world_size, "the first step")
    yield from every_rank(corrupted, cell.world_size, "the step that overflows")
    yield from every_rank(after, cell.world_size, "the step after the overflow")
    for snapshot in before:
        scale = snapshot.scaler.get("scale")
        if scale is None:
            yield f"rank {snapshot.rank}: nothing scales the loss; small gradients vanish in float16"
        elif scale <= 1 or not math.isfinite(scale):
            expected = "more than 1" if scale <= 1 else "a finite number"
            yield f"rank {snapshot.rank}: the loss is scaled by {scale:g}; expected {expected}"
    for moment, snapshots in (("the first step", before), ("the overflow", corrupted), ("the step after it", after)):
        scales = {snapshot.scaler["scale"] for snapshot in snapshots if "scale" in snapshot.scaler}
        if len(scales) > 1:
            listed = ", ".join(f"{scale:g}" for scale in sorted(scales))
            yield f"ranks scale the loss differently after {moment}: by {listed}"
    for old, new in pairs(before, corrupted):
        yield from _skipped(old, new)
    for old, new in pairs(corrupted, after):
        if new.states and _values(old) == _values(new):
            yield f"rank {new.rank}: nothing changed in the step after the overflow; expected training to go on"


def _skipped(old: Snapshot, new: Snapshot) -> Iterator[str]:
    was, now = _values(old), _values(new)
    changed = sorted(name for name in was | now if was.get(name) != now.get(name))
    if changed:
        others = f" and {len(changed) - 1} others" if len(changed) > 1 else ""
        yield f"rank {new.rank}: {changed[0]}{others} changed in a step whose gradients overflow; expected it to be skipped"
    scale, scale_after = old.scaler.get("scale"), new.scaler.get("scale")
    # Hysteresis may tolerate an overflow: https://www.deepspeed.ai/docs/config-json/#fp16-training-options.
    tolerated = new.scaler.get("hysteresis", 1.0) < old.scaler.get("hysteresis", 1.0)
    if scale is not None and scale_after is not None and scale_after >= scale and not tolerated:
        yield f"rank {new.rank}: the scale is {scale_after:g} after an overflow at {scale:g}; expected a smaller one"


def _values(snapshot: Snapshot) -> dict[str, str]:
    """Return the digests of all that a step changes on this rank."""
    found = {repr(info.name): info.digest for info in snapshot.parameters}
    return found | {f"{state.key} of {state.owner!r}": state.digest for state in snapshot.states}
