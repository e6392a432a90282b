"""Does a checkpoint of the model alone hold the whole model, and nothing else?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, first_three
from pytest_distcompat.checks._values import adapter_name, flat_parameters, values
from pytest_distcompat.driver import Driver
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.trace import Trace, UnwrappedInfo


def _saves_optimizer(cell: Cell, driver: type[Driver]) -> str | None:
    return None if cell.option("save_only_model") else "the cell saves the optimizer too"


@check(scenario=TRAIN, until=(("train", "files", 0),), order=15, not_applicable=_saves_optimizer)
def save_only_model(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a checkpoint saved with save_only_model holds all weights, and no optimizer or scheduler state.

    The weights are bit by bit those trained at the save. A trainer that cannot do that must raise when it is built, as
    ``refuses(..., save_only_model=True, match=...)`` declares. transformers raised at the first checkpoint, after hours
    (https://github.com/huggingface/transformers/issues/36626).

    If it fails: weights were not gathered, or were filtered by a name that wrapping had changed.
    """
    run = trace.run()
    unwrapped, at_save, written = run.unwrapped, run.at("save"), run.first("files")
    yield from every_rank(at_save, cell.world_size, "save")
    if unwrapped is None or written is None:
        yield "the saved files were not read"
        return
    for owner, holds in (("an optimizer", "optimizer"), ("a scheduler", "scheduler")):
        paths = [repr(file.path) for file in written.saved if file.holds == holds]
        if paths:
            yield f"state of {owner} is in {', '.join(paths[:3])}; the checkpoint is of the model alone"
    names = _required(cell, unwrapped)
    saved: dict[str, set[str]] = {}
    for key, digest in (pair for file in written.saved for pair in file.digests.items()):
        saved.setdefault(key, set()).add(digest)
    weights = {name: saved[key] for key, name in _keys(unwrapped, names) if key in saved}
    if missing := [name for name in names if name not in weights]:
        yield f"{len(missing)} of {len(names)} weights are not saved, first {first_three(missing)}"
    if flat_parameters(at_save):
        return  # flat parameters have no unwrapped names to compare by
    trained = values(run, at_save)
    yield from trained.wrong
    held = [trained.of(kind) for kind in ("parameter", "buffer", "master")]
    copies = {name: {digest for found in held for digest in found.get(name, ())} for name in names}
    if wrong := [name for name, digests in weights.items() if not copies[name].issuperset(digests)]:
        finding = f"{len(wrong)} of {len(names)} weights have other values in the checkpoint than at the save"
        yield f"{finding}, first {first_three(wrong)}"


def _required(cell: Cell, unwrapped: UnwrappedInfo) -> list[str]:
    """Return the names to be saved, one for tied ones: parameters and persistent buffers, or those of the adapter."""
    if cell.option("lora"):
        return [info.name for info in unwrapped.parameters if info.trainable]
    return [info.name for info in (*unwrapped.parameters, *(one for one in unwrapped.buffers if one.persistent))]


def _keys(unwrapped: UnwrappedInfo, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each key that a weight may have in a file, with the weight's name: PEFT's, a tied one, its own."""
    yield from ((adapter_name(name), name) for name in names)
    yield from ((name, group[0]) for group in unwrapped.tied for name in group if group[0] in names)
    yield from ((name, name) for name in names)
