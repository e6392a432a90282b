"""Do linear layers really compute in 8 bits where that was asked for?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.driver import Driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.trace import Snapshot, Trace

#: Recipes keep the first and the last layer in more bits: accelerate's, by default, both.
KEPT = 2


def _asked(cell: Cell, driver: type[Driver]) -> str | None:
    return None if PRECISIONS.get(cell.precision).float8 else f"{cell.precision} asks for no 8 bits"


@check(scenario=TRAIN, until=(("train", "step", 2),), order=18, not_applicable=_asked)
def float8(cell: Cell, trace: Trace) -> Iterator[str]:
    """On every rank all linear layers whose sizes 16 divides are converted, the first and the last perhaps left out, from
    build on; in a step the factors of their products are made in 8 bits; and the loss is a number.

    If it fails: a conversion that finds no layer says nothing, and the run is plain bfloat16
    (https://github.com/huggingface/accelerate/issues/3360, under DeepSpeed). Verify in stages: 8 bits alone, DeepSpeed
    alone, then both; the check ``active`` tells whether the ZeRO stage is still the one asked for.
    """
    run = trace.run()
    first = run.first("build_model")
    linears = first.unwrapped.linears if first and first.unwrapped else 0
    if not linears:
        yield "the unwrapped model has no linear layer whose sizes 16 divides: there is nothing to convert"
        return
    for what, snapshots in (("build", run.at("build")), ("three steps", run.at("step", 2))):
        yield from every_rank(snapshots, cell.world_size, what)
        for snapshot in snapshots:
            found = snapshot.model.float8 if snapshot.model else 0
            if found < max(1, linears - KEPT):
                told = f"{found} of {linears} linear layers are in 8 bits after {what}"
                yield f"rank {snapshot.rank}: {told}; expected all but the first and the last"
    for snapshot in run.at("step", 2):
        yield from _computed(cell, snapshot)


def _computed(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    if snapshot.loss is None or not math.isfinite(snapshot.loss):
        yield f"rank {snapshot.rank}: the loss is {snapshot.loss}; expected a number"
    layers = snapshot.model.float8 if snapshot.model else 0
    # Transformer Engine casts in kernels of its own, and no one can look inside a compiled graph.
    seen = cell.option("fp8_backend") == "torchao" and not cell.option("compile")
    # Activations and weights, without what backward makes.
    if seen and snapshot.float8 < 2 * layers:
        told = f"{snapshot.float8} tensors were made in 8 bits in a step of {layers} such layers"
        yield f"rank {snapshot.rank}: {told}; expected two factors of each product at least"
