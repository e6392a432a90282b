"""Are parameters, products, gradients, reductions, masters and optimizer state in the precision's dtypes?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, gradient_reductions, requested
from pytest_distcompat.checks._values import TF32_SINCE_BUILD, stages_of
from pytest_distcompat.cost import BYTES, is_quantized
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
    Building the trainer does not turn TF32 on for products in float32; you may do so before.

    If it fails: masters in bfloat16 make the same learning rate train another model
    (https://huggingface.co/blog/deepspeed-to-fsdp-and-back). Load in float32, or upcast before sharding.
    """
    strategy = STRATEGIES.get(cell.strategy)
    row = strategy.dtypes(PRECISIONS.get(cell.precision))
    unwrapped, trained = trace.run().unwrapped, trace.run().trained
    yield from every_rank(trained, cell.world_size, "three steps")
    smallest = _smallest_gradient(cell, unwrapped)
    pipelined = bool(stages_of(trace.run())) and any(one.compute for one in trained)
    # No hook sees inside a compiled graph, and hooks are lost with a layer that is replaced.
    observed = not cell.option("compile") and cell.option("fp8_backend") != "te"
    for snapshot in trained:
        found = [*_stored(row, snapshot)]
        if unwrapped and snapshot.model:
            found += _not_trained(strategy, cell, unwrapped, snapshot.model)
            found += _buffers(strategy, row, cell, unwrapped, snapshot.model)
        # A model without layers that multiply matrices has no products, nor has a stage of embeddings alone.
        without = pipelined and not snapshot.compute
        multiplies = not (without or (unwrapped and unwrapped.products == 0))
        if observed and multiplies and set(snapshot.compute) != {row.compute}:
            found.append(f"matrix products ran in {_list(snapshot.compute)}; expected {row.compute}")
        if cell.world_size > cell.tp * cell.pp:
            found += _reduced(row, cell, snapshot, smallest, exact=requested(cell, unwrapped, "reduce_dtype"))
        found += _accumulated(row, cell, snapshot)
        if row.compute == "float32" and trace.run().tf32_since_build:
            found.append(TF32_SINCE_BUILD)
        yield from (f"rank {snapshot.rank}: {text}" for text in found)
    for snapshot in trained:
        found = [*_stepped(row, cell, snapshot)]
        if cell.option("optimizer") == "adam8bit":
            found += _quantized(row, snapshot)
        yield from (f"rank {snapshot.rank}: {text}" for text in found)


def _stored(row: Dtypes, snapshot: Snapshot) -> Iterator[str]:
    infos = [info for info in snapshot.parameters if info.trainable and info.local_numel]
    wrong = [info for info in infos if _real(info.dtype) != row.storage]
    if wrong:
        finding = (
            f"{len(wrong)} of {len(infos)} trainable parameters are stored in {_list(info.dtype for info in wrong)}"
        )
        yield f"{finding}, first {wrong[0].name!r}; expected {row.storage}"


def _not_trained(strategy: Strategy, cell: Cell, unwrapped: UnwrappedInfo, model: ModelInfo) -> Iterator[str]:
    """Yield a finding for frozen parameters wider than loaded: float32 copies of a frozen model only waste memory."""
    loaded = {info.name: info.dtype for info in unwrapped.parameters}
    shared = {_unit(model, info) for info in model.parameters if info.trainable}
    frozen = [info for info in model.parameters if not info.trainable and info.local_numel]
    pairs = [(info, loaded.get(strategy.canonical(info.name, cell, loaded))) for info in frozen]
    # FSDP1 keeps all of a unit in one flat parameter, which has one dtype.
    alone = ((info, dtype) for info, dtype in pairs if "FSDP1" not in info.kind or _unit(model, info) not in shared)
    if wider := [(info, dtype) for info, dtype in alone if dtype and _wider(info.dtype, dtype)]:
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
    if wrong := [(info, dtype) for info, dtype in pairs if info.dtype != dtype]:
        info, dtype = wrong[0]
        yield f"{len(wrong)} buffers are in {info.dtype}, first {info.name!r}; expected {dtype}"


def _smallest_gradient(cell: Cell, unwrapped: UnwrappedInfo | None) -> int:
    """Return the size from which on a reduction is one of gradients, not of a norm, a metric or a flag."""
    # ZeRO reduces a parameter that spans two partitions in slices, hence the division.
    sizes = (math.prod(info.shape) for info in (unwrapped.parameters if unwrapped else ()) if info.trainable)
    return max(2, min(sizes, default=0) // cell.world_size)


def _reduced(row: Dtypes, cell: Cell, snapshot: Snapshot, smallest: int, *, exact: bool) -> Iterator[str]:
    """Yield a finding if gradients are reduced in a wrong dtype."""
    # A wider one is wrong only if the dtype was requested: torch's autocast around FSDP2 reduces so.
    expected = "float32" if cell.option("reduce_dtype") == "fp32" else row.reduce
    found = {_real(info.dtype) for info in gradient_reductions(cell, snapshot) if info.numel >= smallest}
    if not found or any(dtype != expected and (exact or not _wider(dtype, expected)) for dtype in found):
        yield f"gradients were reduced in {_list(found)}; expected {expected}"


def _accumulated(row: Dtypes, cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding if ZeRO sums micro-batches in a wrong dtype; others sum in the optimizer's gradients."""
    found = snapshot.optimizer.accumulates if snapshot.optimizer else ""
    expected = "float32" if cell.option("grad_accum_dtype") == "fp32" else row.storage
    if found not in {"", expected}:
        yield f"gradients are added up in {found}; expected {expected}"


def _quantized(row: Dtypes, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding for each kind of state that is not quantized where it is large enough, and only there."""
    moments = [state for state in snapshot.states if state.key not in {"step", "master"} and state.numel]
    large = set(filter(is_quantized, moments))
    if not large:
        yield "no state is large enough to be quantized"
    for key in dict.fromkeys(state.key for state in moments):
        for some, size, expected in ((large, "", "uint8"), ({*moments} - large, "small ", row.state)):
            found = {state.dtype for state in some if state.key == key}
            if found - {expected}:
                yield f"{size}{key} is kept in {_list(found)}; expected {expected}"


def _stepped(row: Dtypes, cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    if not snapshot.steps:
        yield "no optimizer stepped"
    # Of a small model the last of many ranks may hold no trainable element.
    holds = any(info.trainable and info.local_numel for info in snapshot.parameters)
    # SGD without momentum keeps no state.
    stateless = all(state.key in {"step", "master"} for state in snapshot.states)
    for step in snapshot.steps if holds else ():
        expectations = [("updates", step.master, row.master), ("is given gradients in", step.gradient, row.gradient)]
        # What is quantized has two dtypes: ``_quantized``.
        if cell.option("optimizer") != "adam8bit" and (step.state or not stateless):
            expectations.append(("keeps state in", step.state, row.state))
        for verb, found, expected in expectations:
            if set(map(_real, found)) != {expected}:
                masters = " masters" if found and verb == "updates" else ""
                yield f"{step.optimizer} {verb} {_list(found)}{masters}; expected {expected}"


#: Complex dtypes by the real dtype of their parts: an optimizer treats one as two real numbers (``torch.view_as_real``).
_REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def _real(dtype: str) -> str:
    """Return the real dtype that a tensor is computed in."""
    return _REAL.get(dtype, dtype)


def _list(dtypes: Iterable[str]) -> str:
    return " and ".join(sorted(set(dtypes))) or "nothing"
