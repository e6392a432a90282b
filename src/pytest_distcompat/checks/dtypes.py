"""Are parameters, products, gradients, masters and optimizer state in the precision's dtypes?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import (
    check,
    every_rank,
    gradient_reductions,
    requested,
    with_rank,
)
from pytest_distcompat.cost import BYTES, is_quantized
from pytest_distcompat.model_values import TF32_SINCE_BUILD, stages_of
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES, Dtypes
from pytest_distcompat.trace import (
    ModelInfo,
    ParameterInfo,
    RunTrace,
    Snapshot,
    StateInfo,
    StepInfo,
    Trace,
    UnwrappedInfo,
)


@check(scenario=TRAIN, until=(("train", "step", 2),), order=3)
def dtypes(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that every tensor has the dtype that the strategy gives it for the precision.

    The strategy's row of the dtype table says which: of stored parameters, products, gradients (as
    reduced, and as the optimizer sees them), masters and state. A frozen parameter is no wider than
    loaded. Buffers may keep their dtype. Without ``reduce_dtype`` gradients may travel in a wider
    dtype. ``adam8bit`` keeps the state of large parts in 8 bits, at least one tensor on each rank.
    Building the trainer does not turn TF32 on for products in float32; you may do so before.

    If it fails: masters in bfloat16 make the same learning rate train another model
    (https://huggingface.co/blog/deepspeed-to-fsdp-and-back). Load in float32, or upcast before
    sharding.
    """
    run = trace.run()
    row = STRATEGIES.get(cell.strategy).dtypes(PRECISIONS.get(cell.precision))
    trained = run.trained
    yield from every_rank(trained, cell.world_size, "three steps")
    for snapshot in trained:
        yield from with_rank(snapshot, _tensors_of_model(row, cell, run, snapshot))
    for snapshot in trained:
        yield from with_rank(snapshot, _tensors_of_optimizer(row, cell, snapshot))


def _tensors_of_model(row: Dtypes, cell: Cell, run: RunTrace, snapshot: Snapshot) -> Iterator[str]:
    """Yield findings about a rank's parameters, buffers, products and sums of gradients."""
    yield from _stored(row, snapshot)
    if run.unwrapped and snapshot.model:
        yield from _frozen(cell, run.unwrapped, snapshot.model)
        yield from _buffers(row, cell, run.unwrapped, snapshot.model)
    if _has_products(cell, run, snapshot):
        yield from _computed(row, snapshot)
    if cell.world_size > cell.tp * cell.pp:
        yield from _reduced(row, cell, run.unwrapped, snapshot)
    yield from _accumulated(row, cell, snapshot)
    if row.compute == "float32" and run.tf32_since_build:
        yield TF32_SINCE_BUILD


def _tensors_of_optimizer(row: Dtypes, cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield findings about what a rank's optimizer updates, is given and keeps."""
    yield from _stepped(row, cell, snapshot)
    if cell.option("optimizer") == "adam8bit":
        yield from _quantized(row, snapshot)


def _computed(row: Dtypes, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding if matrix products ran in another dtype, or in none."""
    if set(snapshot.compute) != {row.compute}:
        yield f"matrix products ran in {_list(snapshot.compute)}; expected {row.compute}"


def _has_products(cell: Cell, run: RunTrace, snapshot: Snapshot) -> bool:
    """Tell whether the dtypes of the rank's matrix products must have been recorded."""
    # No hook sees inside a compiled graph, and hooks are lost with a layer that is replaced.
    if cell.option("compile") or cell.option("fp8_backend") == "te":
        return False
    # A model may have no layers that multiply matrices.
    if run.unwrapped and run.unwrapped.products == 0:
        return False
    # Nor has a stage of embeddings alone, if other stages have some.
    if stages_of(run) and not snapshot.compute:
        return not any(other.compute for other in run.trained)
    return True


def _stored(row: Dtypes, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding if trainable parameters are stored in another dtype."""
    trainable = 0
    others: list[ParameterInfo] = []
    dtypes: set[str] = set()
    for info in snapshot.parameters:
        if not info.trainable or not info.local_numel:
            continue
        trainable += 1
        if _real(info.dtype) != row.storage:
            others.append(info)
            dtypes.add(info.dtype)
    if not others:
        return
    count = len(others)
    first = others[0].name
    stored = f"{count} of {trainable} trainable parameters are stored in {_list(dtypes)}"
    yield f"{stored}, first {first!r}; expected {row.storage}"


@dataclass(frozen=True)
class _OtherDtype:
    """A live parameter or buffer that is in another dtype than expected.

    Attributes:
        name: Its live name.
        dtype: Its dtype.
        expected: The expected one.
    """

    name: str
    dtype: str
    expected: str


def _frozen(cell: Cell, unwrapped: UnwrappedInfo, model: ModelInfo) -> Iterator[str]:
    """Yield a finding for frozen parameters that are wider than loaded.

    Copies of a frozen model in float32 only waste memory.
    """
    strategy = STRATEGIES.get(cell.strategy)
    loaded_dtypes = {info.name: info.dtype for info in unwrapped.parameters}
    trained_units = _trained_units(model)
    frozen = 0
    wider: list[_OtherDtype] = []
    for info in model.parameters:
        if info.trainable or not info.local_numel:
            continue
        frozen += 1
        # FSDP1 keeps all of a unit in one flat parameter, which has one dtype.
        if "FSDP1" in info.kind and _unit(model, info) in trained_units:
            continue
        name = strategy.canonical(info.name, cell, loaded_dtypes)
        loaded = loaded_dtypes.get(name)
        if loaded and _wider(info.dtype, loaded):
            wider.append(_OtherDtype(info.name, info.dtype, loaded))
    if not wider:
        return
    count = len(wider)
    first = wider[0]
    stored = f"{count} of {frozen} frozen parameters are stored in {first.dtype}"
    yield f"{stored}, first {first.name!r}; loaded in {first.expected}"


def _trained_units(model: ModelInfo) -> set[str]:
    """Return the FSDP units that hold a trainable parameter."""
    units: set[str] = set()
    for info in model.parameters:
        if info.trainable:
            units.add(_unit(model, info))
    return units


def _wider(dtype: str, than: str) -> bool:
    """Tell whether a dtype has more bytes than another.

    Dtypes that ``BYTES`` does not list are no wider than others, and others no wider than they.
    """
    return BYTES.get(dtype, 0) > BYTES.get(than, 8)


def _unit(model: ModelInfo, info: ParameterInfo) -> str:
    """Return the innermost FSDP unit that holds the parameter; the root's name is empty."""
    innermost = ""
    for unit in model.units:
        is_in_unit = info.name.startswith(f"{unit}.")
        if is_in_unit and len(unit) > len(innermost):
            innermost = unit
    return innermost


def _buffers(row: Dtypes, cell: Cell, unwrapped: UnwrappedInfo, model: ModelInfo) -> Iterator[str]:
    """Yield a finding if buffers have another dtype than in the unwrapped model.

    Each is compared with its own counterpart, because buffers may differ in dtype. The row may give
    another dtype for those of floating-point numbers.
    """
    strategy = STRATEGIES.get(cell.strategy)
    expected_dtypes: dict[str, str] = {}
    for info in unwrapped.buffers:
        expected_dtypes[info.name] = info.dtype
        if row.buffer and "float" in info.dtype:
            expected_dtypes[info.name] = row.buffer
    others: list[_OtherDtype] = []
    for info in model.buffers:
        name = strategy.canonical(info.name, cell, expected_dtypes)
        # Missing and new buffers are findings of the check ``names``.
        expected = expected_dtypes.get(name, info.dtype)
        if info.dtype != expected:
            others.append(_OtherDtype(info.name, info.dtype, expected))
    if others:
        first = others[0]
        buffers = f"{len(others)} buffers are in {first.dtype}"
        yield f"{buffers}, first {first.name!r}; expected {first.expected}"


def _smallest_gradient(cell: Cell, unwrapped: UnwrappedInfo | None) -> int:
    """Return the number of elements from which on a reduction is taken for one of gradients.

    Smaller ones are of norms, metrics and flags.
    """
    sizes: list[int] = []
    if unwrapped:
        for info in unwrapped.parameters:
            if info.trainable:
                sizes.append(math.prod(info.shape))
    # ZeRO reduces a parameter that spans two partitions in slices, hence the division.
    return max(2, min(sizes, default=0) // cell.world_size)


def _reduced(
    row: Dtypes, cell: Cell, unwrapped: UnwrappedInfo | None, snapshot: Snapshot
) -> Iterator[str]:
    """Yield a finding if gradients are reduced in a wrong dtype."""
    expected = row.reduce
    if cell.option("reduce_dtype") == "fp32":
        expected = "float32"
    smallest = _smallest_gradient(cell, unwrapped)
    dtypes: set[str] = set()
    for info in gradient_reductions(cell, snapshot):
        if info.numel >= smallest:
            dtypes.add(_real(info.dtype))
    wrong = dtypes - {expected}
    if not requested(cell, unwrapped, "reduce_dtype"):
        # Then a wider one is allowed: torch's autocast around FSDP2 reduces so.
        wider = {dtype for dtype in wrong if _wider(dtype, expected)}
        wrong -= wider
    if wrong or not dtypes:
        yield f"gradients were reduced in {_list(dtypes)}; expected {expected}"


def _accumulated(row: Dtypes, cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding if ZeRO sums the gradients of micro-batches in a wrong dtype.

    Other strategies sum them in the gradients that the optimizer sees.
    """
    if snapshot.optimizer is None:
        return
    expected = row.storage
    if cell.option("grad_accum_dtype") == "fp32":
        expected = "float32"
    dtype = snapshot.optimizer.accumulates
    if dtype not in {"", expected}:
        yield f"gradients are added up in {dtype}; expected {expected}"


def _quantized(row: Dtypes, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding for each kind of state that is not in 8 bits where its tensors are large.

    And for each that is, or is in another wrong dtype, where they are small.
    """
    keys: list[str] = []
    large_dtypes: dict[str, set[str]] = defaultdict(set)
    small_dtypes: dict[str, set[str]] = defaultdict(set)
    for state in snapshot.states:
        if not _is_moment(state) or not state.numel:
            continue
        if state.key not in keys:
            keys.append(state.key)
        if is_quantized(state):
            large_dtypes[state.key].add(state.dtype)
        else:
            small_dtypes[state.key].add(state.dtype)
    if not large_dtypes:
        yield "no state is large enough to be quantized"
    for key in keys:
        large = large_dtypes[key]
        if large - {"uint8"}:
            yield f"{key} is kept in {_list(large)}; expected uint8"
        small = small_dtypes[key]
        if small - {row.state}:
            yield f"small {key} is kept in {_list(small)}; expected {row.state}"


def _is_moment(state: StateInfo) -> bool:
    """Tell whether a state of the optimizer has the dtype of moments.

    Step counts and master weights do not.
    """
    return state.key not in {"step", "master"}


def _stepped(row: Dtypes, cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield findings for wrong dtypes of masters, gradients and state in the optimizer's steps."""
    if not snapshot.steps:
        yield "no optimizer stepped"
    # Of a small model the last of many ranks may hold no trainable element.
    if not any(info.trainable and info.local_numel for info in snapshot.parameters):
        return
    # SGD without momentum keeps no state.
    stateless = not any(_is_moment(state) for state in snapshot.states)
    for step in snapshot.steps:
        yield from _masters(row, step)
        if _real_dtypes(step.gradient) != {row.gradient}:
            gradients = f"gradients in {_list(step.gradient)}"
            yield f"{step.optimizer} is given {gradients}; expected {row.gradient}"
        # What is quantized has two dtypes: ``_quantized``.
        if cell.option("optimizer") == "adam8bit" or (stateless and not step.state):
            continue
        if _real_dtypes(step.state) != {row.state}:
            state = f"state in {_list(step.state)}"
            yield f"{step.optimizer} keeps {state}; expected {row.state}"


def _masters(row: Dtypes, step: StepInfo) -> Iterator[str]:
    """Yield a finding if a step updated weights in another dtype."""
    if not step.master:
        yield f"{step.optimizer} updates nothing; expected {row.master}"
    elif _real_dtypes(step.master) != {row.master}:
        masters = f"{_list(step.master)} masters"
        yield f"{step.optimizer} updates {masters}; expected {row.master}"


#: Complex dtypes by the real dtype of their parts: an optimizer treats one as two real numbers
#: (``torch.view_as_real``).
_REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def _real(dtype: str) -> str:
    """Return the real dtype that a tensor is computed in."""
    return _REAL.get(dtype, dtype)


def _real_dtypes(dtypes: Iterable[str]) -> set[str]:
    """Return the real dtypes that tensors are computed in."""
    return {_real(dtype) for dtype in dtypes}


def _list(dtypes: Iterable[str]) -> str:
    """Return the words for some dtypes in a finding."""
    return " and ".join(sorted(set(dtypes))) or "nothing"
