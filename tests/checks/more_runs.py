"""Hand-made traces of runs that go on from one another, with digests that compose: for any check, in any cell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tests.checks.sound_runs import layout

from pytest_distcompat import digests
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.live_calls import Calls
from pytest_distcompat.scenario import Run
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import (
    FileInfo,
    Layout,
    ModelInfo,
    OptimizerInfo,
    ParameterInfo,
    RunFailure,
    RunTrace,
    Snapshot,
    StateInfo,
    Trace,
    UnwrappedInfo,
)

#: As in ``traces``, but sizes that no number of ranks divides.
SHAPES = {"inlet.weight": (3, 3), "frozen.weight": (5, 5), "outlet.weight": (2, 7)}
TRAINABLE = ("inlet.weight", "outlet.weight")
TIED = ("inlet.weight", "head.weight")
#: The actions that take a step.
STEPS = frozenset({"step", "reference"})
SAVED = (*SHAPES, "head.weight", "scale")


class Claims(Driver):
    """Claims everything that a driver can claim."""

    name = "claims"
    reshards = tuple(STRATEGIES.names())
    live_calls: ClassVar[type[Calls]] = Calls
    portable: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("ddp", "fsdp1", "zero1", "zero3"), "fsdp2"),
        "fsdp2": "ddp",
    }

    @classmethod
    def can(cls, action: str) -> bool:
        """All of it."""
        return bool(action)

    @classmethod
    def loads_best(cls, cell: Cell) -> bool:
        """It does."""
        return bool(cell)

    @classmethod
    def keeps_saves(cls, cell: Cell) -> bool:
        """All of them."""
        return bool(cell)


def trace_of(cell: Cell, check: str) -> Trace:
    """Return the snapshots in the runs of that check when nothing is wrong."""
    scenario = CHECKS.get(check).runs(cell, Claims)
    return Trace.of("hand-made", [_run(cell, run) for run in scenario.runs])


def words(name: str, done: int, numel: int) -> list[int]:
    """Return the values of a tensor after so many steps."""
    offset = 7 * done + ord(name[-1])
    values = []
    for number in range(numel):
        drawn = hash((len(name), name[0] == "o", number)) % 1000
        values.append(drawn + offset)
    return values


def digest_of(values: list[int]) -> str:
    """As ``probe.tensors.digest`` makes it, word by word."""
    return digests.concatenate(digests.form(1, (value, value)) for value in values)


@dataclass(frozen=True)
class Place:
    """Where in which run a snapshot is, and how many steps were taken by then."""

    cell: Cell
    run: Run
    index: int
    done: int
    rank: int

    @property
    def action(self) -> str:
        return self.run.actions[self.index]

    def live(self, name: str) -> str:
        """How a parameter of the unwrapped model is called in this run."""
        front = {"fsdp1": "_fsdp_wrapped_module.", "fsdp2": ""}.get(self.cell.strategy, "module.")
        return front + name

    def part(self, name: str, kind: str, numel: int, *, split: bool) -> dict[str, Any]:
        """The digest of what this rank holds, its size and its layout."""
        done = self.done if name in TRAINABLE else 0
        all_values = words(name + kind, done, numel)
        part = layout(self.cell, self.rank, name) if split else Layout()
        holders = part.holders or (self.rank,)
        size = math.ceil(numel / len(holders))
        start = size * holders.index(self.rank)
        own = all_values[start:][:size]
        digest = digest_of(own)
        if split and not part.flat:
            # The digest of a DTensor's shard knows its place in the whole.
            before = [0] * start
            _, hashes = digests.read(digest_of(before + own))
            digest = digests.form(len(own), hashes)
        return {"digest": digest, "numel": len(own), "layout": part}


def _run(cell: Cell, run: Run) -> RunTrace:
    run_cell = run.cell(cell)
    snapshots = []
    done = 0
    saved = 0
    end = None
    for index, action in enumerate(run.actions):
        if action == "load" and run.damage:
            message = "FileNotFoundError: no such file: 'checkpoint/shard_0.pt'"
            end = RunFailure("raised", f"rank 0 raised {message}", f"rank 0 raised {message}\n...", action, index)
            break
        if action == "save" and run.damage == "block":
            message = f"FileExistsError: File exists: '{run.directory}'"
            end = RunFailure("raised", f"rank 0 raised {message}", f"rank 0 raised {message}\n...", action, index)
            break
        if action == "reload":
            done = 20
        elif action == "load":
            done = run.first_step if run.after else saved
        elif action in {"again", "reference_again"}:
            done = 0
        elif action in STEPS:
            done += 1
        if action == "save":
            saved = done
        for rank in range(run_cell.world_size):
            place = Place(run_cell, run, index, done, rank)
            snapshots.append(_snapshot(place))
    return RunTrace(run.name, run_cell.world_size, tuple(snapshots), end, run_cell.id)


def _snapshot(place: Place) -> Snapshot:
    infos: dict[str, Any] = {}
    if place.action in {"build_model", "reload"}:
        infos["unwrapped"] = _unwrapped(place.done)
    elif place.action == "files":
        infos["files"] = _files() if place.rank == 0 else ()
    elif place.action == "damage":
        damaged = FileInfo("checkpoint/shard_0.pt", "", place.run.damage, ())
        infos["files"] = (damaged,) if place.rank == 0 else ()
    elif place.action == "evaluate":
        infos["outputs"] = (0.25, -2.0, 1.5)
    else:
        infos["model"] = _model(place)
        infos["optimizer"] = _optimizer(place)
        infos["scheduler"] = f"last_epoch={place.done}"
        if place.action in STEPS:
            infos["loss"] = 1 / place.done
    return Snapshot(place.rank, place.run.name, place.action, place.index, **infos)


def _unwrapped(done: int) -> UnwrappedInfo:
    parameters = (
        ParameterInfo(
            name,
            shape,
            "float32",
            name in TRAINABLE,
            digest=digest_of(_after(name, done)),
            local_numel=math.prod(shape),
        )
        for name, shape in SHAPES.items()
    )
    return UnwrappedInfo(tuple(parameters), (_scale(),), SAVED, (TIED,))


def _after(name: str, done: int) -> list[int]:
    numel = math.prod(SHAPES[name])
    updates = done if name in TRAINABLE else 0
    return words(name, updates, numel)


def _scale() -> ParameterInfo:
    return ParameterInfo("scale", (4,), "float32", False, persistent=True, local_numel=4, digest=digest_of([1] * 4))


def _model(place: Place) -> ModelInfo:
    strategy = STRATEGIES.get(place.cell.strategy)
    parameters = []
    for name, shape in SHAPES.items():
        part = place.part(name, "", math.prod(shape), split=strategy.shards)
        info = ParameterInfo(
            place.live(name),
            shape,
            "float32",
            name in TRAINABLE,
            strategy.kind,
            layout=part["layout"],
            local_numel=part["numel"],
            digest=part["digest"],
        )
        parameters.append(info)
    return ModelInfo(
        "Toy",
        {strategy.wrapper: 1},
        tuple(parameters),
        (_scale(),),
        world_size=place.cell.world_size,
    )


def _optimizer(place: Place) -> OptimizerInfo:
    strategy = STRATEGIES.get(place.cell.strategy)
    groups = ({"lr": 0.1 * 0.5**place.done, "weight_decay": 0.01},)
    steps = {"digest": digest_of([place.done]), "numel": 1, "layout": Layout()}
    is_split = strategy.shards or strategy.flat_masters
    states: list[StateInfo] = []
    masters: list[StateInfo] = []
    for name in TRAINABLE:
        numel = math.prod(SHAPES[name])
        owner = place.live(name)
        for key in ("exp_avg", "exp_avg_sq"):
            part = place.part(name, key, numel, split=is_split)
            moment = StateInfo(owner, key, "float32", **_as_state(part))
            if strategy.flat_masters:
                masters.append(moment)
            else:
                states.append(moment)
        if strategy.flat_masters:
            part = place.part(name, "", numel, split=True)
            masters.append(StateInfo(owner, "master", "float32", **_as_state(part)))
        else:
            states.append(StateInfo(owner, "step", "float32", **_as_state(steps)))
    if strategy.flat_masters:
        states.append(StateInfo("partition 0", "step", "float32", **_as_state(steps)))
    if not place.done:
        return OptimizerInfo(("AdamW",), 2, param_groups=groups)
    return OptimizerInfo(("AdamW",), 2, states=tuple(states), masters=tuple(masters), param_groups=groups)


def _as_state(part: dict[str, Any]) -> dict[str, Any]:
    return {name: part[name] for name in ("numel", "digest", "layout")}


def _files() -> tuple[FileInfo, ...]:
    shapes = {**SHAPES, "head.weight": SHAPES["inlet.weight"]}
    return (
        FileInfo("model.safetensors", "safetensors", "model", SAVED, shapes),
        FileInfo("export/model.safetensors", "safetensors", "model", SAVED, shapes),
    )
