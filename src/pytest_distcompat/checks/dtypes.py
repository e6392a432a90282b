"""Check ``dtypes``: each kind of tensor has the dtype that the strategy gives it.

``judge.judge`` calls the check once the run has ended. It gets a cell, one point of the test matrix
such as ``fsdp2-bf16_upcast-w2`` (strategy, precision, 2 ranks), and a trace of the run ``train``
(one process group from start to end) with a snapshot of each rank after three steps. It yields
findings, such as ``rank 0: AdamW updates bfloat16 masters; expected float32``.

The expected dtypes are a row of a table, ``Dtypes``, which the strategy has for the precision: of
stored parameters (``storage``), matrix products (``compute``), gradients in collectives
(``reduce``), gradients that the optimizer sees (``gradient``), the parameters that it updates
(``master``) and its moments (``state``). Masters are the live parameters, or float32 copies of
them that the optimizer keeps.

Dtypes are torch's names without the prefix: ``float32``. The *unwrapped* model is the one before
anything wraps it; a *live* name is that of the wrapped model, such as ``module.lm_head.weight``,
and ``strategy.canonical`` returns the unwrapped one for it, ``lm_head.weight``.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, requested, with_rank
from pytest_distcompat.checks._reductions import gradient_reductions
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
    # A finding for ranks without a snapshot.
    yield from every_rank(trained, cell.world_size, "three steps")
    for snapshot in trained:
        # ``with_rank`` puts "rank 0: " before each text.
        yield from with_rank(snapshot, _tensors_of_model(row, cell, run, snapshot))
    for snapshot in trained:
        yield from with_rank(snapshot, _tensors_of_optimizer(row, cell, snapshot))


def _tensors_of_model(row: Dtypes, cell: Cell, run: RunTrace, snapshot: Snapshot) -> Iterator[str]:
    """Yield texts about a rank's parameters, buffers, products and reduced gradients."""
    yield from _stored(row, snapshot)
    if run.unwrapped and snapshot.model:
        yield from _frozen(cell, run.unwrapped, snapshot.model)
        yield from _buffers(row, cell, run.unwrapped, snapshot.model)
    if _has_products(cell, run, snapshot):
        yield from _computed(row, snapshot)
    # If all ranks hold parts of one copy of the model, gradients are not reduced.
    if cell.world_size > cell.tp * cell.pp:
        yield from _reduced(row, cell, run.unwrapped, snapshot)
    yield from _accumulated(row, cell, snapshot)
    # In TF32 a GPU multiplies float32 with 10 bits of each factor. A user may turn it on before the
    # build, but the trainer must not.
    if row.compute == "float32" and run.tf32_since_build:
        yield TF32_SINCE_BUILD


def _tensors_of_optimizer(row: Dtypes, cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield texts about the dtypes of masters, gradients and state in a rank's optimizer."""
    yield from _stepped(row, cell, snapshot)
    if cell.option("optimizer") == "adam8bit":
        yield from _quantized(row, snapshot)


def _computed(row: Dtypes, snapshot: Snapshot) -> Iterator[str]:
    """Yield a text if matrix products ran in another dtype, or if there was none."""
    if set(snapshot.compute) != {row.compute}:
        yield f"matrix products ran in {_list(snapshot.compute)}; expected {row.compute}"


def _has_products(cell: Cell, run: RunTrace, snapshot: Snapshot) -> bool:
    """Tell whether the dtypes of the rank's matrix products must have been recorded."""
    # No hook sees inside a compiled graph. Transformer Engine (``te``) replaces layers, and the
    # hooks are lost with them.
    if cell.option("compile") or cell.option("fp8_backend") == "te":
        return False
    # The model has no layers that multiply matrices.
    if run.unwrapped and run.unwrapped.products == 0:
        return False
    # A pipeline stage is some of the layers. One of embeddings alone has no products, which is
    # right if another stage has some.
    if stages_of(run) and not snapshot.compute:
        return not any(other.compute for other in run.trained)
    return True


def _stored(row: Dtypes, snapshot: Snapshot) -> Iterator[str]:
    """Yield a text if trainable parameters are stored in another dtype."""
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
    """Yield a text if frozen parameters are stored in a wider dtype than they were loaded in.

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
        # FSDP1 joins all parameters of a unit (a module that it wraps) into one FlatParameter,
        # which has one dtype. So a frozen one has the dtype of the trained ones in its unit.
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
    """Return the names of the FSDP units that hold a trainable parameter."""
    units: set[str] = set()
    for info in model.parameters:
        if info.trainable:
            units.add(_unit(model, info))
    return units


def _wider(dtype: str, than: str) -> bool:
    """Tell whether a dtype has more bytes an element than another one.

    A dtype that ``BYTES`` does not list is not wider than any, and none is wider than it.
    """
    return BYTES.get(dtype, 0) > BYTES.get(than, 8)


def _unit(model: ModelInfo, info: ParameterInfo) -> str:
    """Return the name of the innermost FSDP unit that holds the parameter; empty for the root."""
    innermost = ""
    for unit in model.units:
        is_in_unit = info.name.startswith(f"{unit}.")
        if is_in_unit and len(unit) > len(innermost):
            innermost = unit
    return innermost


def _buffers(row: Dtypes, cell: Cell, unwrapped: UnwrappedInfo, model: ModelInfo) -> Iterator[str]:
    """Yield a text if buffers have another dtype than in the unwrapped model.

    A strategy may cast buffers of floating-point numbers: then ``row.buffer`` is their dtype. If it
    does not, a trainer that upcasts the whole model may upcast them with its parameters.
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
        # The check ``names`` reports missing and new buffers.
        expected = expected_dtypes.get(name, info.dtype)
        upcast = not row.buffer and info.dtype == row.storage and _wider(info.dtype, expected)
        if info.dtype != expected and not upcast:
            others.append(_OtherDtype(info.name, info.dtype, expected))
    if others:
        first = others[0]
        buffers = f"{len(others)} buffers are in {first.dtype}"
        yield f"{buffers}, first {first.name!r}; expected {first.expected}"


def _smallest_gradient(cell: Cell, unwrapped: UnwrappedInfo | None) -> int:
    """Return the least number of elements of a collective that counts as one of gradients.

    Smaller collectives reduce norms, metrics and flags.
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
    """Yield a text if gradients are reduced in a wrong dtype, or not at all."""
    expected = row.reduce
    if cell.option("reduce_dtype") == "fp32":
        expected = "float32"
    smallest = _smallest_gradient(cell, unwrapped)
    dtypes: set[str] = set()
    for info in gradient_reductions(cell, snapshot):
        if info.numel >= smallest:
            dtypes.add(_real(info.dtype))
    wrong = dtypes - {expected}
    # It is not requested if the cell has the default, and the driver does not support the option.
    if not requested(cell, unwrapped, "reduce_dtype"):
        # The trainer was not told the dtype, so a wider one is allowed: torch's autocast around
        # FSDP2 reduces in float32.
        wider = {dtype for dtype in wrong if _wider(dtype, expected)}
        wrong -= wider
    if wrong or not dtypes:
        yield f"gradients were reduced in {_list(dtypes)}; expected {expected}"


def _accumulated(row: Dtypes, cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a text if ZeRO adds up the gradients of micro-batches in a wrong dtype.

    ``optimizer.accumulates`` is the dtype that DeepSpeed adds up in. It is empty for other
    strategies: they add up in ``parameter.grad``, which the optimizer sees.
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
    """Yield texts about optimizer state of ``adam8bit`` in wrong dtypes.

    Large tensors must be in 8 bits (``uint8``), small ones in the dtype of the row. torchao decides
    by the number of elements.
    """
    # The kinds of state, such as ``exp_avg``, in the order in which they appear.
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
    """Tell whether it is state with the dtype of moments: no step count and no master weight."""
    return state.key not in {"step", "master"}


def _stepped(row: Dtypes, cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield texts about wrong dtypes of masters, gradients and state in the optimizer's steps."""
    if not snapshot.steps:
        yield "no optimizer stepped"
    # If a small model is sharded over many ranks, the last ones may hold no trainable element.
    if not any(info.trainable and info.local_numel for info in snapshot.parameters):
        return
    # SGD without momentum keeps no state.
    stateless = not any(_is_moment(state) for state in snapshot.states)
    for step in snapshot.steps:
        yield from _masters(row, step)
        if _real_dtypes(step.gradient) != {row.gradient}:
            gradients = f"gradients in {_list(step.gradient)}"
            yield f"{step.optimizer} is given {gradients}; expected {row.gradient}"
        # ``_quantized`` looks at the state of ``adam8bit``, which has two dtypes.
        if cell.option("optimizer") == "adam8bit" or (stateless and not step.state):
            continue
        if _real_dtypes(step.state) != {row.state}:
            state = f"state in {_list(step.state)}"
            yield f"{step.optimizer} keeps {state}; expected {row.state}"


def _masters(row: Dtypes, step: StepInfo) -> Iterator[str]:
    """Yield a text if a step updated weights in another dtype, or none."""
    if not step.master:
        yield f"{step.optimizer} updates nothing; expected {row.master}"
    elif _real_dtypes(step.master) != {row.master}:
        masters = f"{_list(step.master)} masters"
        yield f"{step.optimizer} updates {masters}; expected {row.master}"


#: Complex dtype -> real dtype of its two parts. Optimizers treat a complex number as two real ones
#: (``torch.view_as_real``).
_REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def _real(dtype: str) -> str:
    """Return the dtype itself, or the real dtype of the parts of a complex one."""
    return _REAL.get(dtype, dtype)


def _real_dtypes(dtypes: Iterable[str]) -> set[str]:
    """Return the dtypes with complex ones replaced by the real dtype of their parts."""
    return {_real(dtype) for dtype in dtypes}


def _list(dtypes: Iterable[str]) -> str:
    """Return the words for dtypes: ``bfloat16 and float32``, ``nothing`` for none."""
    return " and ".join(sorted(set(dtypes))) or "nothing"
