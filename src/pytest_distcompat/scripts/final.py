"""Does what the run left load, without the trainer, and is it what was trained?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks.export import names_in, same_values
from pytest_distcompat.checks.names import adapter_name
from pytest_distcompat.scripts.recorder import END, STRIDE
from pytest_distcompat.trace import LifeTrace, Moment, PlainFact


def findings(
    life: LifeTrace,
    cell: Cell,
    place: Path | None,
    checkpoints: Sequence[str],
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    *,
    saved_name: Callable[[str], str],
) -> list[str]:
    """What is wrong with what a run of that life left in ``place``, beside the ``checkpoints`` that it wrote on its way;
    ``read`` has ``scripts.reading`` answer a question.

    It is to hold weights; they load by transformers' ``from_pretrained`` (or, where there is no ``config.json``, as the DCP,
    safetensors or torch file that they are) with no key missing, unexpected or of another shape; and each parameter and
    persistent buffer equals the trained one, value by value, as after the last step.
    """
    if place is None:
        return ["nothing says where the run leaves its model: tell launch(output=...)"]
    if not place.exists():
        return [f"{place} does not exist: the run left no model"]
    found = read({"what": "final", "path": str(place.resolve()), "checkpoints": checkpoints})
    if found["problem"]:
        return [f"{place}: {found['problem']}"]
    return [f"{place}: {text}" for text in _compare(life, cell, found, saved_name)]


def _compare(life: LifeTrace, cell: Cell, read: Mapping[str, Any], saved_name: Callable[[str], str]) -> Iterator[str]:
    for title in ("missing", "unexpected", "mismatched"):
        if read[title]:
            first, *others = read[title]
            yield f"from_pretrained: {title} key {first!r}{f' and {len(others)} others' if others else ''}"
    first_moment = life.first("plain")
    if first_moment is None or first_moment.plain is None:
        yield "the plain model was not seen"
        return
    files = Moment.from_json({"rank": 0, "life": "", "verb": "", "index": 0, "files": read["files"]}).files
    files = tuple(file.renamed(saved_name) for file in files)
    yield from names_in(cell, first_moment.plain, list(files))
    last = max((m.index // STRIDE for m in life.moments if m.verb == "step"), default=0)
    trained = list(_trained(life, last))
    if len(trained) < life.world_size:
        seen = ", ".join(str(moment.rank) for moment in trained) or "none"
        yield f"the weights after step {last}, the last, were seen on ranks {seen} only: the model was gone at the end"
        return
    written = [Moment(0, "train", "files", last * STRIDE + END + n, files=files) for n in (1, 2)]
    train = LifeTrace("train", life.world_size, (first_moment, *trained, *written), cell=cell.id)
    loaded = Moment.from_json({"rank": 0, "life": "reload", "verb": "reload", "index": 0, "plain": read["plain"]})
    assert loaded.plain is not None
    # A library may load names that it has mapped when it saved; what it still calls otherwise is a part of the model by itself.
    known = {fact.name for fact in (*first_moment.plain.parameters, *first_moment.plain.buffers)}
    kept = frozenset() if read["stored"] else known
    loaded = dataclasses.replace(
        loaded, plain=_renamed(loaded.plain, lambda key: key if key in kept else saved_name(key))
    )
    assert loaded.plain is not None
    only = None
    if read["stored"] and cell.option(
        "adapter"
    ):  # the adapter alone, as PEFT names it; the model below it was there before
        trainable = {adapter_name(fact.name): fact.name for fact in first_moment.plain.parameters if fact.trainable}
        loaded = dataclasses.replace(loaded, plain=_renamed(loaded.plain, lambda key: trainable.get(key, key)))
        only = set(trainable.values())
    assert loaded.plain is not None
    yield from same_values(train, LifeTrace("reload", 1, (loaded,), cell=cell.id), loaded.plain, only=only)


def _renamed(plain: PlainFact, name: Callable[[str], str]) -> PlainFact:
    """Return the model with other names for its parameters and buffers."""
    parameters = tuple(dataclasses.replace(fact, name=name(fact.name)) for fact in plain.parameters)
    buffers = tuple(dataclasses.replace(fact, name=name(fact.name)) for fact in plain.buffers)
    return dataclasses.replace(plain, parameters=parameters, buffers=buffers)


def _trained(life: LifeTrace, last: int) -> Iterator[Moment]:
    """Of each rank the latest look at all values since the last step."""
    for rank in range(life.world_size):
        seen = [m for m in life.moments if m.rank == rank and m.model is not None and m.index // STRIDE == last]
        if seen:
            yield dataclasses.replace(max(seen, key=lambda one: one.index), verb="export", index=last * STRIDE + END)
