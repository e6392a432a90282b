"""Are parameters, products, gradients, reductions, masters and optimizer state in the precision's dtypes?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, gradient_reductions, requested
from pytest_distcompat.checks._values import stages_of
from pytest_distcompat.cost import BYTES, QUANTIZED_BLOCK, QUANTIZED_FROM
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES, Dtypes, Strategy
from pytest_distcompat.trace import ModelInfo, ParameterInfo, Snapshot, Trace, UnwrappedInfo


@check(scenario=TRAIN, until=(("train", "step", 2),), order=3)
def dtypes(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that every tensor has the dtype that the strategy's row of the dtype table gives for the precision.

    Tensors are stored parameters, products, gradients (as reduced, and as the optimizer sees them), masters and state.
    A frozen parameter is no wider than loaded. Buffers may keep their dtype. Without ``reduce_dtype`` gradients may
    travel in a wider dtype. ``adam8bit`` keeps the state of large parts in 8 bits, at least one tensor on each rank.

    If it fails: masters in bfloat16 make the same learning rate train another model
    (https://huggingface.co/blog/deepspeed-to-fsdp-and-back). Load in float32, or upcast before sharding.
    """
    strategy = STRATEGIES.get(cell.strategy)
    row = strategy.dtypes(PRECISIONS.get(cell.precision))
    unwrapped, trained = trace.run().unwrapped, trace.run().trained
    yield from every_rank(trained, cell.world_size, "three steps")
    smallest = _smallest_gradient(cell, unwrapped)
    pipelined = bool(stages_of(trace.run())) and any(one.compute for one in trained)
    for snapshot in trained:
        yield from _stored(row, snapshot)
        if unwrapped and snapshot.model:
            findings = (
                _not_trained(strategy, cell, unwrapped, snapshot.model),
                _buffers(strategy, row, cell, unwrapped, snapshot.model),
            )
            yield from (f"rank {snapshot.rank}: {text}" for text in itertools.chain(*findings))
        # No hook sees inside a compiled graph, and hooks are lost with a layer that is replaced.
        observed = not cell.option("compile") and cell.option("fp8_backend") != "te"
        # A model without layers that multiply matrices has no products, nor has a stage of embeddings alone.
        without = pipelined and not snapshot.compute
        if observed and not without and not (unwrapped and unwrapped.products == 0):
            yield from _computed(row, snapshot)
        if cell.world_size > cell.tp * cell.pp:
            yield from _reduced(
                row, cell, snapshot, smallest, dtype_requested=requested(cell, unwrapped, "reduce_dtype")
            )
        yield from _accumulated(row, cell, snapshot)
    yield from _stepped(row, cell, trained)
    if cell.option("optimizer") == "adam8bit":
        yield from _quantized(row, trained)


def _stored(row: Dtypes, snapshot: Snapshot) -> Iterator[str]:
    infos = [info for info in snapshot.parameters if info.trainable and info.local_numel]
    wrong = [info for info in infos if info.dtype != row.storage]
    if wrong:
        yield (
            f"rank {snapshot.rank}: {len(wrong)} of {len(infos)} trainable parameters are stored in "
            f"{_list(info.dtype for info in wrong)}, first {wrong[0].name!r}; expected {row.storage}"
        )


def _not_trained(strategy: Strategy, cell: Cell, unwrapped: UnwrappedInfo, model: ModelInfo) -> Iterator[str]:
    """Yield a finding for frozen parameters wider than loaded: float32 copies of a frozen model only waste memory."""
    loaded = {info.name: info.dtype for info in unwrapped.parameters}
    shared = {_unit(model, info) for info in model.parameters if info.trainable}
    frozen = [info for info in model.parameters if not info.trainable and info.local_numel]
    pairs = [(info, loaded.get(strategy.canonical(info.name, cell, loaded))) for info in frozen]
    wider = [
        (info, dtype)
        for info, dtype in pairs
        # FSDP1 keeps all of a unit in one flat parameter, which has one dtype.
        if dtype and _wider(info.dtype, dtype) and not ("FSDP1" in info.kind and _unit(model, info) in shared)
    ]
    if wider:
        info, dtype = wider[0]
        finding = f"{len(wider)} of {len(frozen)} frozen parameters are stored in {info.dtype}, first {info.name!r}"
        yield f"{finding}; loaded in {dtype}"


def _wider(dtype: str, than: str) -> bool:
    """Tell whether a dtype has more bytes than another; False for dtypes that ``BYTES`` does not list."""
    return BYTES.get(dtype, 0) > BYTES.get(than, 8)


def _unit(model: ModelInfo, info: ParameterInfo) -> str:
    """Return the innermost FSDP unit that holds the parameter."""
    return max((unit for unit in model.units if not unit or info.name.startswith(f"{unit}.")), key=len, default="")


def _buffers(strategy: Strategy, row: Dtypes, cell: Cell, unwrapped: UnwrappedInfo, model: ModelInfo) -> Iterator[str]:
    """Yield a finding if a buffer has another dtype than its own counterpart; buffers may differ in dtype."""
    expected = {
        info.name: row.buffer if row.buffer and "float" in info.dtype else info.dtype for info in unwrapped.buffers
    }
    pairs = [(info, expected.get(strategy.canonical(info.name, cell, expected), info.dtype)) for info in model.buffers]
    # Missing and new buffers are findings of the check ``names``.
    wrong = [(info, dtype) for info, dtype in pairs if info.dtype != dtype]
    if wrong:
        info, dtype = wrong[0]
        yield f"{len(wrong)} buffers are in {info.dtype}, first {info.name!r}; expected {dtype}"


def _computed(row: Dtypes, snapshot: Snapshot) -> Iterator[str]:
    found = {info.output for info in snapshot.compute}
    if found != {row.compute}:
        yield f"rank {snapshot.rank}: matrix products ran in {_list(found)}; expected {row.compute}"


def _smallest_gradient(cell: Cell, unwrapped: UnwrappedInfo | None) -> int:
    """Return the size from which on a reduction is one of gradients, not of a norm, a metric or a flag."""
    # ZeRO reduces a parameter that spans two partitions in slices, hence the division.
    sizes = (math.prod(info.shape) for info in (unwrapped.parameters if unwrapped else ()) if info.trainable)
    return max(2, min(sizes, default=0) // cell.world_size)


def _reduced(row: Dtypes, cell: Cell, snapshot: Snapshot, smallest: int, *, dtype_requested: bool) -> Iterator[str]:
    """Yield a finding if gradients are reduced in a wrong dtype."""
    # A wider one is wrong only if the dtype was requested: torch's autocast around FSDP2 reduces so.
    expected = "float32" if cell.option("reduce_dtype") == "fp32" else row.reduce
    found = {info.dtype for info in gradient_reductions(cell, snapshot) if info.numel >= smallest}
    wrong = {dtype for dtype in found if dtype != expected and (dtype_requested or not _wider(dtype, expected))}
    if wrong or not found:
        yield f"rank {snapshot.rank}: gradients were reduced in {_list(found)}; expected {expected}"


def _accumulated(row: Dtypes, cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding if ZeRO sums micro-batches in a wrong dtype; others sum in the optimizer's gradients."""
    found = snapshot.optimizer.accumulates if snapshot.optimizer else ""
    expected = "float32" if cell.option("grad_accum_dtype") == "fp32" else row.storage
    if found not in {"", expected}:
        yield f"rank {snapshot.rank}: gradients are added up in {found}; expected {expected}"


def _quantized(row: Dtypes, trained: tuple[Snapshot, ...]) -> Iterator[str]:
    """Yield a finding for each kind of state that is not quantized where it is large enough, and only there."""
    for snapshot in trained:
        moments = [state for state in snapshot.states if state.key not in {"step", "master"} and state.numel]
        large = {one for one in moments if one.numel >= QUANTIZED_FROM and one.numel % QUANTIZED_BLOCK == 0}
        if not large:
            yield f"rank {snapshot.rank}: no state is large enough to be quantized"
        for key in dict.fromkeys(state.key for state in moments):
            for some, size, expected in ((large, "", "uint8"), ({*moments} - large, "small ", row.state)):
                found = {state.dtype for state in some if state.key == key}
                if found - {expected}:
                    yield f"rank {snapshot.rank}: {size}{key} is kept in {_list(found)}; expected {expected}"


def _stepped(row: Dtypes, cell: Cell, trained: tuple[Snapshot, ...]) -> Iterator[str]:
    for snapshot in trained:
        if not snapshot.steps:
            yield f"rank {snapshot.rank}: no optimizer stepped"
        if not _holds(snapshot):
            continue
        for step in snapshot.steps:
            for verb, found, expected in (
                ("updates", step.master, row.master),
                ("is given gradients in", step.gradient, row.gradient),
                ("keeps state in", step.state, row.state),
            ):
                if verb == "keeps state in" and (
                    cell.option("optimizer") == "adam8bit" or not (found or _keeps_state(snapshot))
                ):
                    continue
                if set(found) != {expected}:
                    optimizer = f"rank {snapshot.rank}: {step.optimizer}"
                    masters = " masters" if found and verb == "updates" else ""
                    yield f"{optimizer} {verb} {_list(found)}{masters}; expected {expected}"


def _keeps_state(snapshot: Snapshot) -> bool:
    """Tell whether the optimizer keeps state; SGD without momentum keeps none."""
    return any(state.key not in {"step", "master"} for state in snapshot.states)


def _holds(snapshot: Snapshot) -> bool:
    """Tell whether this rank holds trainable elements: of a small model the last of many ranks may hold none."""
    return any(info.trainable and info.local_numel for info in snapshot.parameters)


def _list(dtypes: Iterable[str]) -> str:
    return " and ".join(sorted(set(dtypes))) or "nothing"
