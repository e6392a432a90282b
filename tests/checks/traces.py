"""Hand-made traces: a sound one for any cell, and ways to alter it, so that a test shows only what is wrong in its case."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import RESUME_LIFE, TRAIN_LIFE, Life
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import (
    CollectiveFact,
    ComputeFact,
    FileFact,
    LifeTrace,
    ModelFact,
    Moment,
    OptimizerFact,
    ParameterFact,
    PlainFact,
    StateFact,
    StepFact,
    Trace,
)

#: Even sizes, so that halves are halves; one frozen parameter; one name that is tied to another.
SHAPES = {"inlet.weight": (4, 2), "frozen.weight": (4, 4), "outlet.weight": (2, 4)}
TRAINABLE = ("inlet.weight", "outlet.weight")
TIED = ("inlet.weight", "head.weight")
SAVED = (*SHAPES, "head.weight", "scale")


@dataclass(frozen=True)
class Story:
    """A cell with the trace of train and resume; every alteration gives a new story."""

    cell: Cell
    trace: Trace

    @classmethod
    def sound(cls, cell_id: str) -> Story:
        """What the probes write when nothing is wrong."""
        cell = Cell.parse(cell_id)
        lives = [_life(cell, life) for life in (TRAIN_LIFE, RESUME_LIFE)]
        return cls(cell, Trace.of("hand-made", lives))

    def findings(self, check: str) -> list[str]:
        """What the check of that name finds."""
        return CHECKS.get(check).findings(self.cell, self.trace)

    def live(self, name: str) -> str:
        """How a parameter of the plain model is called in this cell."""
        return _live_name(self.cell, name)

    def alter(
        self,
        change: Callable[[Moment], Moment | None],
        *,
        life: str = "train",
        verb: str = "",
        nth: int | None = None,
        rank: int | None = None,
    ) -> Story:
        """Change the chosen moments (None takes one out); no verb means all, no ``nth`` every such verb."""
        old = self.trace.life(life)
        chosen = [
            moment
            for moment in (old.at(verb, nth) if nth is not None else old.moments)
            if verb in {"", moment.verb} and rank in {None, moment.rank}
        ]
        assert chosen, "a test that alters nothing tests nothing"
        moments = (change(moment) if moment in chosen else moment for moment in old.moments)
        new = replace(old, moments=tuple(moment for moment in moments if moment))
        return replace(self, trace=replace(self.trace, lives={**self.trace.lives, life: new}))

    def without(self, verb: str, **where: Any) -> Story:
        """The same, with the moments after that verb gone."""
        return self.alter(lambda moment: None, verb=verb, **where)

    def moment(self, verb: str, changes: dict[str, Any], **where: Any) -> Story:
        """The same, with other fields in the moments after that verb."""
        return self.alter(lambda moment: replace(moment, **changes), verb=verb, **where)

    def model(self, changes: dict[str, Any], **where: Any) -> Story:
        """The same, with other fields of the live model."""
        return self._part("model", lambda model: replace(model, **changes), where)

    def optimizer(self, changes: dict[str, Any], **where: Any) -> Story:
        """The same, with other fields of the optimizer."""
        return self._part("optimizer", lambda optimizer: replace(optimizer, **changes), where)

    def state(self, key: str, changes: dict[str, Any], *, only: str = "", **where: Any) -> Story:
        """The same, with other fields in the optimizer's state: under that key, of one parameter, or all but the steps."""
        name = self.live(only) if only else ""

        def change(fact: StateFact) -> StateFact:
            meant = fact.key == key if key else fact.key != "step"
            return replace(fact, **changes) if meant and name in {"", fact.owner} else fact

        return self._part("optimizer", lambda optimizer: _each(optimizer, "states", change), where)

    def stepped(self, changes: dict[str, Any], **where: Any) -> Story:
        """The same, with other dtypes where the optimizer stepped."""
        return self._each("steps", lambda step: replace(step, **changes), where)

    def parameters(self, changes: dict[str, Any], *, only: str = "", **where: Any) -> Story:
        """The same, with other fields of one live parameter (by its plain name), or of all."""
        name = self.live(only) if only else ""

        def change(fact: ParameterFact) -> ParameterFact:
            return replace(fact, **changes) if name in {"", fact.name} else fact

        return self._part("model", lambda model: _each(model, "parameters", change), where)

    def renamed(self, old: str, new: str, **where: Any) -> Story:
        """The same, with a live parameter (by its plain name) under another live name, in the optimizer too."""
        name = self.live(old)

        def state(fact: StateFact) -> StateFact:
            return replace(fact, owner=new) if fact.owner == name else fact

        story = self.parameters({"name": new}, only=old, **where)
        return story._part("optimizer", lambda optimizer: _each(optimizer, "states", state), where)

    def file(self, position: int, **changes: Any) -> Story:
        """The same, with other fields of one saved file: 0 is the model's, 1 the optimizer's."""

        def change(moment: Moment) -> Moment:
            files = list(moment.files)
            files[position] = replace(files[position], **changes)
            return replace(moment, files=tuple(files))

        return self.alter(change, verb="files", rank=0)

    def _part(self, name: str, change: Callable[[Any], Any], where: dict[str, Any]) -> Story:
        def altered(moment: Moment) -> Moment:
            part = getattr(moment, name)
            return replace(moment, **{name: part and change(part)})

        return self.alter(altered, **where)

    def _each(self, name: str, change: Callable[[Any], Any], where: dict[str, Any]) -> Story:
        return self.alter(lambda moment: _each(moment, name, change), **where)


#: What the fixture gives: from a cell's id to its sound story.
Sound = Callable[[str], Story]


def _each(fact: Any, name: str, change: Callable[[Any], Any]) -> Any:
    return replace(fact, **{name: tuple(change(one) for one in getattr(fact, name))})


def _live_name(cell: Cell, name: str) -> str:
    front = {"ddp": "module.", "fsdp1": "_fsdp_wrapped_module.", "fsdp2": ""}.get(cell.strategy, "module.")
    return ("_orig_mod." if cell.option("compile") else "") + front + name


def _life(cell: Cell, life: Life) -> LifeTrace:
    moments, done = [], life.first_step
    for index, verb in enumerate(life.verbs):
        done += verb == "step"
        moments += [_moment(cell, life, index, done, rank) for rank in range(cell.world_size)]
    return LifeTrace(life.name, cell.world_size, tuple(moments))


def _moment(cell: Cell, life: Life, index: int, done: int, rank: int) -> Moment:
    """``done`` counts the optimizer steps so far; a life that resumes has none of its own until it loaded."""
    verb = life.verbs[index]
    if life.after and verb == "build":
        done = 0
    moment = Moment(rank, life.name, verb, index)
    if verb == "plain":
        return replace(moment, plain=_plain(cell))
    if verb == "files":
        return replace(moment, files=_files() if rank == 0 else ())
    moment = replace(
        moment, model=_model(cell, done, rank), optimizer=_optimizer(cell, done, rank), scheduler=f"last_epoch={done}"
    )
    return replace(moment, loss=1 / done + rank, **_watched(cell)) if verb == "step" else moment


def _plain(cell: Cell) -> PlainFact:
    load = PRECISIONS.get(cell.precision).load
    parameters = (ParameterFact(name, shape, load, name in TRAINABLE) for name, shape in SHAPES.items())
    return PlainFact(tuple(parameters), (_scale(),), SAVED, (TIED,))


def _scale() -> ParameterFact:
    return ParameterFact("scale", (4,), "float32", False, placement="persistent", local_numel=4, digest="scale")


def _model(cell: Cell, done: int, rank: int) -> ModelFact:
    strategy = STRATEGIES.get(cell.strategy)
    storage = strategy.dtypes(PRECISIONS.get(cell.precision)).storage
    parameters = []
    for name, shape in SHAPES.items():
        train = name in TRAINABLE
        fact = ParameterFact(_live_name(cell, name), shape, storage, train, strategy.kind, held=int(train))
        part = f" of rank {rank}" if strategy.shards else ""
        fact = replace(
            fact,
            local_numel=math.prod(shape) // (cell.world_size if strategy.shards else 1),
            digest=f"{name} after {done * train}{part}",
        )
        parameters.append(replace(fact, held=None) if strategy.flat_masters else fact)
    wrappers = {strategy.wrapper: 1, **({"OptimizedModule": 1} if cell.option("compile") else {})}
    return ModelFact(
        "Toy",
        wrappers,
        tuple(parameters),
        (_scale(),),
        world_size=cell.world_size,
        trainer_world_size=cell.world_size,
        zero_stage=strategy.zero_stage,
    )


def _optimizer(cell: Cell, done: int, rank: int) -> OptimizerFact:
    strategy = STRATEGIES.get(cell.strategy)
    row = strategy.dtypes(PRECISIONS.get(cell.precision))
    names = [_live_name(cell, name) for name in TRAINABLE]
    owners = ["partition 0"] if strategy.flat_masters else names
    states = [
        StateFact(owner, key, row.state, 4, f"{owner} {key} after {done} of rank {rank}")
        for owner in owners
        for key in ("exp_avg", "exp_avg_sq", "step")
        if done
    ]
    partitioned = dict.fromkeys(names, 8 // cell.world_size) if strategy.flat_masters else {}
    return OptimizerFact(("AdamW",), len(owners), states=tuple(states), partitioned=partitioned, groups=({"lr": 0.1},))


def _watched(cell: Cell) -> dict[str, Any]:
    strategy = STRATEGIES.get(cell.strategy)
    row = strategy.dtypes(PRECISIONS.get(cell.precision))
    reduction = "reduce_scatter_base" if strategy.shards else "allreduce"
    collectives = (
        CollectiveFact(reduction, row.reduce, 1, 16),
        # What is no gradient and must not be taken for one: a norm, a flag, gathered parameters.
        CollectiveFact("allreduce", "float64", 1, 1),
        CollectiveFact("allreduce", "int64", 1, 16),
        CollectiveFact("allgather_base", "float16", 1, 16),
    )
    compute = () if cell.option("compile") else (ComputeFact("inlet", row.storage, row.compute, row.compute),)
    step = StepFact("AdamW", (row.master,), (row.gradient,), (row.state,))
    return {"steps": (step,), "compute": compute, "collectives": collectives}


def _files() -> tuple[FileFact, ...]:
    return (
        FileFact("model.safetensors", "safetensors", "model", SAVED, {**SHAPES, "head.weight": (4, 2)}),
        FileFact("optimizer.bin", "torch", "optimizer", TRAINABLE),
    )
