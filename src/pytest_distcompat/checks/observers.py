"""Do saving and exporting leave what is trained as it is?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, pairs
from pytest_distcompat.checks.resume import same_state
from pytest_distcompat.scenario import SAVED, TRAIN
from pytest_distcompat.trace import Trace


@check(scenario=TRAIN, until=(("train", "save", 0), ("train", "exported", 0)), order=9)
def observers(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that neither saving a checkpoint nor exporting the weights changes what is trained.

    Parameters, buffers, optimizer, scheduler, scaler and torch's random state stay equal bit by bit.

    If it fails: look for a step of the optimizer that creates state to save, for weights that are cast or moved in place, and
    for what draws random numbers.
    """
    train = trace.run("train")
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
