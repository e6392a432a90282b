"""Are storage, compute, reduction, gradients, masters and optimizer state in the dtypes that the mode promises?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import asked, check, every_rank
from pytest_distcompat.checks.active import REDUCTIONS
from pytest_distcompat.cost import BYTES
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES, Dtypes, Strategy
from pytest_distcompat.trace import ModelFact, Moment, ParameterFact, PlainFact, Trace


@check(scenario=TRAIN, until=(("train", "step", 2),), order=3)
def dtypes(cell: Cell, trace: Trace) -> Iterator[str]:
    """On every rank, stored parameters, matrix products, gradients on the wire, gradients that the optimizer sees (added up
    over the micro-batches of a step), what the optimizer updates and its state have the dtypes of the strategy's row in the
    table; a parameter that is not trained is no wider than it was loaded, and buffers are what they were, or what the row says.
    What gradients travel in may be wider where the driver does not speak the option ``reduce_dtype``.

    If it fails: master and state in bfloat16 where float32 is promised is the case of
    https://huggingface.co/blog/deepspeed-to-fsdp-and-back: the same learning rate then trains another model. Load in
    float32, or let the trainer upcast before it shards.
    """
    strategy = STRATEGIES.get(cell.strategy)
    row = strategy.dtypes(PRECISIONS.get(cell.precision))
    first, trained = trace.run().first("plain"), trace.run().at("step", 2)
    plain = first.plain if first else None
    yield from every_rank(trained, cell.world_size, "three steps")
    smallest = _smallest_gradient(cell, plain)
    for moment in trained:
        yield from _stored(row, moment)
        if plain and moment.model:
            kept = (
                _not_trained(strategy, cell, plain, moment.model),
                _buffers(strategy, row, cell, plain, moment.model),
            )
            yield from (f"rank {moment.rank}: {text}" for text in itertools.chain(*kept))
        # No hook can look inside a compiled graph, and none stays on a layer that another was put in the place of.
        watched = not cell.option("compile") and cell.option("fp8_backend") != "te"
        # A model without a layer that multiplies by a matrix has nothing to see.
        if watched and not (plain and plain.products == 0):
            yield from _computed(row, moment)
        if cell.world_size > 1:
            yield from _reduced(row, cell, moment, smallest, told=asked(cell, plain, "reduce_dtype"))
        yield from _accumulated(row, cell, moment)
    yield from _stepped(row, trained)


def _stored(row: Dtypes, moment: Moment) -> Iterator[str]:
    facts = [fact for fact in (moment.model.parameters if moment.model else ()) if fact.trainable and fact.local_numel]
    wrong = [fact for fact in facts if fact.dtype != row.storage]
    if wrong:
        yield (
            f"rank {moment.rank}: {len(wrong)} of {len(facts)} trainable parameters are stored in "
            f"{_list(fact.dtype for fact in wrong)}, first {wrong[0].name!r}; expected {row.storage}"
        )


def _not_trained(strategy: Strategy, cell: Cell, plain: PlainFact, model: ModelFact) -> Iterator[str]:
    """Masters are for what is trained: of a frozen base model they are memory for nothing."""
    loaded = {fact.name: fact.dtype for fact in plain.parameters}
    shared = {_unit(model, fact) for fact in model.parameters if fact.trainable}
    frozen = [fact for fact in model.parameters if not fact.trainable and fact.local_numel]
    pairs = [(fact, loaded.get(strategy.canonical(fact.name, cell, loaded))) for fact in frozen]
    wider = [
        (fact, dtype)
        for fact, dtype in pairs
        # FSDP1 keeps all of a unit in one flat parameter, which has one dtype.
        if dtype and _wider(fact.dtype, dtype) and not ("FSDP1" in fact.kind and _unit(model, fact) in shared)
    ]
    if wider:
        fact, dtype = wider[0]
        told = f"{len(wider)} of {len(frozen)} frozen parameters are stored in {fact.dtype}, first {fact.name!r}"
        yield f"{told}; loaded in {dtype}"


def _wider(dtype: str, than: str) -> bool:
    """Nothing is said of a dtype that is new to us."""
    return BYTES.get(dtype, 0) > BYTES.get(than, 8)


def _unit(model: ModelFact, fact: ParameterFact) -> str:
    """The unit of FSDP that the parameter is in: the innermost."""
    return max((unit for unit in model.units if not unit or fact.name.startswith(f"{unit}.")), key=len, default="")


def _buffers(strategy: Strategy, row: Dtypes, cell: Cell, plain: PlainFact, model: ModelFact) -> Iterator[str]:
    """Each by its name: one in bfloat16 is no leave for the others to be rounded."""
    expected = {fact.name: row.buffer if row.buffer and "float" in fact.dtype else fact.dtype for fact in plain.buffers}
    pairs = [(fact, expected.get(strategy.canonical(fact.name, cell, expected), fact.dtype)) for fact in model.buffers]
    # That one is missing, or new, is the names' business.
    wrong = [(fact, dtype) for fact, dtype in pairs if fact.dtype != dtype]
    if wrong:
        fact, dtype = wrong[0]
        yield f"{len(wrong)} buffers are in {fact.dtype}, first {fact.name!r}; expected {dtype}"


def _computed(row: Dtypes, moment: Moment) -> Iterator[str]:
    found = {fact.output for fact in moment.compute}
    if found != {row.compute}:
        yield f"rank {moment.rank}: matrix products ran in {_list(found)}; expected {row.compute}"


def _smallest_gradient(cell: Cell, plain: PlainFact | None) -> int:
    """A reduction of fewer elements is a norm, a metric or a flag, no gradient.

    ZeRO reduces a parameter that lies across two partitions in slices, hence the division.
    """
    sizes = (math.prod(fact.shape) for fact in (plain.parameters if plain else ()) if fact.trainable)
    return max(2, min(sizes, default=0) // cell.world_size)


def _reduced(row: Dtypes, cell: Cell, moment: Moment, smallest: int, *, told: bool) -> Iterator[str]:
    """Who was not asked for a dtype may choose a wider one: traffic, no defect. torch's autocast around FSDP2 does."""
    expected = "float32" if cell.option("reduce_dtype") == "fp32" else row.reduce
    found = {
        fact.dtype
        for fact in moment.collectives
        if fact.op in REDUCTIONS and fact.numel >= smallest and "float" in fact.dtype
    }
    wrong = {dtype for dtype in found if dtype != expected and (told or not _wider(dtype, expected))}
    if wrong or not found:
        yield f"rank {moment.rank}: gradients were reduced in {_list(found)}; expected {expected}"


def _accumulated(row: Dtypes, cell: Cell, moment: Moment) -> Iterator[str]:
    """Only ZeRO has buffers of their own for it; all others add up in what the optimizer is given."""
    found = moment.optimizer.accumulates if moment.optimizer else ""
    expected = "float32" if cell.option("grad_accum_dtype") == "fp32" else row.storage
    if found not in {"", expected}:
        yield f"rank {moment.rank}: gradients are added up in {found}; expected {expected}"


def _stepped(row: Dtypes, trained: tuple[Moment, ...]) -> Iterator[str]:
    for moment in trained:
        if not moment.steps:
            yield f"rank {moment.rank}: no optimizer stepped"
        if not _holds(moment):
            continue
        for step in moment.steps:
            for what, found, expected in (
                ("updates", step.master, row.master),
                ("is given gradients in", step.gradient, row.gradient),
                ("keeps state in", step.state, row.state),
            ):
                stateless = what == "keeps state in" and not found and not _keeps_state(moment)
                if set(found) != {expected} and not stateless:
                    who = f"rank {moment.rank}: {step.optimizer}"
                    yield f"{who} {what} {_list(found)}{' masters' if found and what == 'updates' else ''}; expected {expected}"


def _keeps_state(moment: Moment) -> bool:
    """SGD without momentum keeps none."""
    return any(state.key not in {"step", "master"} for state in (moment.optimizer.states if moment.optimizer else ()))


def _holds(moment: Moment) -> bool:
    """Whether there is anything on this rank to step on: of a small model, the last of many ranks may hold nothing."""
    facts = moment.model.parameters if moment.model else ()
    return any(fact.trainable and fact.local_numel for fact in facts)


def _list(dtypes: Iterable[str]) -> str:
    return " and ".join(sorted(set(dtypes))) or "nothing"
