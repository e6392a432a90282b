"""Check ``start``: training starts from the model that was loaded.

A trainer may make weights anew, or load them on one rank only. Its losses look sound all the same.

``judge.judge`` calls the check once the run has ended. It gets a cell, one point of the test matrix
such as ``fsdp2-bf16_upcast-w2``, and a trace of the run ``train`` (one process group from start to
end). After the action ``build_model`` the trace has a record of the *unwrapped* model: the model
before anything wraps it, with digests (hashes) of its values. After ``build`` it has, for each
rank, what the trainer made of it. The check yields findings, such as ``parameter 'lm_head.weight':
other values after build than were loaded``.

Digests of a whole tensor can be computed from those of its shards. If the precision computes in a
lower dtype than the model was loaded in, the record also has the digest of the value that is
rounded to that dtype (``rounded``).

For a cell with an adapter two more runs are compared (``_unadapted``).

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from pytest_distcompat import digests
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Snapshots, check, every_rank, module_of, with_rank
from pytest_distcompat.checks._unadapted import other_outputs, runs_with_adapter
from pytest_distcompat.cost import nbytes
from pytest_distcompat.model_values import Kind, Names, values
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ParameterInfo, RunTrace, Snapshot, Trace, UnwrappedInfo
from pytest_distcompat.wording import and_others


@check(
    scenario=runs_with_adapter,
    until=(("train", "step", 0), ("adapted", "evaluate", 0), ("unadapted", "evaluate", 0)),
    order=3,
)
def start(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that training starts from the model that build_model() returns on rank 0.

    After ``build`` parameters and masters have its values, on all ranks together, and
    ``requires_grad`` is as it was. Only what is stored in the dtype that the precision computes in
    is rounded, as masters of ZeRO may be, and buffers. Modules with trainable parameters that were
    in training mode are so in the first step. A new adapter changes no outputs, unless the cell
    sets how it begins (``init_...``).

    If it fails: weights were made anew, or loaded on one rank and not sent to the others; masters
    were copied from rounded weights; making the optimizer's state was a step with weight decay. A
    trainer that makes a model of its own is to copy the given values in ``build``.
    """
    yield from other_outputs(trace)
    run = trace.run("train")
    built = run.at("build")
    yield from every_rank(built, cell.world_size, "build")
    if run.unwrapped is None:
        yield "the unwrapped model was not recorded"
        return
    yield from _other_parameters(cell, run, built)
    # Returns the unwrapped name of what a rank has recorded under a name with wrappers' prefixes.
    names = Names(run, run.unwrapped)
    for snapshot in built:
        yield from with_rank(snapshot, _other_buffers(snapshot, run.unwrapped, names))
        yield from with_rank(snapshot, _other_flags(snapshot, run.unwrapped, names))
    # Of each rank the snapshot after the first step.
    for snapshot in run.at("step", 0):
        yield from with_rank(snapshot, _evaluating(snapshot, run.unwrapped, names))


def _other_parameters(cell: Cell, run: RunTrace, built: Snapshots) -> Iterator[str]:
    """Yield findings for parameters and masters that have other values than loaded.

    Masters are the float32 copies of parameters that ZeRO's optimizer updates.
    """
    assert run.unwrapped is not None
    loaded = _with_values(run.unwrapped.parameters)
    for name in _flat_in_memory_order(cell, run.unwrapped):
        loaded.pop(name, None)
    if not loaded:
        return
    # Of each kind of tensor: unwrapped name -> the digests of its values, several if replicas
    # differ (``of``), and unwrapped name -> the dtypes that its parts are stored in (``dtypes``).
    built_values = values(run, built)
    for kind in ("parameter", "master"):
        built_dtypes = built_values.dtypes[kind]
        # Names with values that differ between replicas, and names with one wrong value.
        apart: list[str] = []
        others: list[str] = []
        for name, built_digests in built_values.of(kind).items():
            # FSDP1's flat parameters have no names to compare by, and the check ``names`` reports
            # a name too many. Parts that do not make up a whole have no digest.
            if name not in loaded or not built_digests:
                continue
            expected = _expected_values(cell, kind, loaded[name], built_dtypes[name])
            if not expected or expected.issuperset(built_digests):
                continue
            if len(built_digests) > 1:
                apart.append(name)
            else:
                others.append(name)
        if apart:
            yield (
                f"{kind} {and_others(apart)}: unlike from rank to rank after build; "
                "expected the loaded values"
            )
        if others:
            yield f"{kind} {and_others(others)}: other values after build than were loaded"


def _flat_in_memory_order(cell: Cell, unwrapped: UnwrappedInfo) -> Collection[str]:
    """Return the names of parameters that FSDP1 flattens in another order than that of the tensor.

    It takes the elements as they lie in memory, which is another order for a transposed tensor. The
    digests of its pieces then differ for that reason alone.
    """
    # https://github.com/pytorch/pytorch/blob/v2.9.0/torch/distributed/fsdp/_flat_param.py,
    # ``flatten_tensors``.
    if cell.strategy != "fsdp1":
        return ()
    return unwrapped.noncontiguous


def _with_values(infos: Iterable[ParameterInfo]) -> dict[str, ParameterInfo]:
    """Return name -> tensor, without tensors on the meta device, which have no values."""
    with_values: dict[str, ParameterInfo] = {}
    for info in infos:
        # A tensor on the meta device has the digest of an empty tensor, whatever its shape is.
        has_no_elements = 0 in info.shape
        if not info.digest or (info.digest == digests.EMPTY and not has_no_elements):
            continue
        with_values[info.name] = info
    return with_values


def _expected_values(
    cell: Cell, kind: Kind, loaded: ParameterInfo, dtypes: Collection[str]
) -> set[str]:
    """Return the digests that a parameter or a master may have.

    The result is empty if its dtype is too narrow, which the check ``dtypes`` reports.

    Args:
        cell: The cell.
        kind: ``parameter`` or ``master``.
        loaded: The record of the parameter in the unwrapped model.
        dtypes: The dtypes in which ranks store it after the build.
    """
    # ZeRO from stage 1 on: all masters are in one vector, of which each rank updates a piece.
    has_flat_masters = STRATEGIES.get(cell.strategy).flat_masters
    if kind == "master" or has_flat_masters:
        # DeepSpeed may cast the model before it copies the masters from it. Then parameters and
        # masters have rounded values, in whatever dtype they are stored.
        return {loaded.digest, loaded.rounded or loaded.digest}
    compute = PRECISIONS.get(cell.precision).compute
    if loaded.rounded and set(dtypes) == {compute}:
        return {loaded.rounded}
    loaded_bytes = nbytes(1, loaded.dtype)
    for dtype in dtypes:
        if nbytes(1, dtype) < loaded_bytes:
            return set()
    return {loaded.digest}


def _other_buffers(snapshot: Snapshot, unwrapped: UnwrappedInfo, names: Names) -> Iterator[str]:
    """Yield a text for buffers that have another dtype than loaded, and also other values."""
    # The check ``names`` compares buffers that kept their dtype.
    loaded = _with_values(unwrapped.buffers)
    others: list[str] = []
    for info in snapshot.buffers:
        before = loaded.get(names(info.name))
        if before is None or info.dtype == before.dtype:
            continue
        if info.digest not in {before.digest, before.rounded}:
            others.append(before.name)
    if others:
        yield f"buffer {and_others(others)}: other values after build than were loaded"


def _other_flags(snapshot: Snapshot, unwrapped: UnwrappedInfo, names: Names) -> Iterator[str]:
    """Yield texts for parameters that became trainable, or frozen, since they were loaded."""
    trainable = {info.name: info.trainable for info in unwrapped.parameters}
    frozen: list[str] = []
    thawed: list[str] = []
    for info in snapshot.parameters:
        name = names(info.name)
        if info.trainable == trainable.get(name, info.trainable):
            continue
        if info.trainable:
            thawed.append(name)
        else:
            frozen.append(name)
    if frozen:
        yield f"parameter {and_others(frozen)}: frozen after build; trainable when loaded"
    if thawed:
        yield f"parameter {and_others(thawed)}: trainable after build; frozen when loaded"


def _evaluating(snapshot: Snapshot, unwrapped: UnwrappedInfo, names: Names) -> Iterator[str]:
    """Yield a text if modules with trainable parameters are in evaluation mode in the first step.

    Modules that were in evaluation mode when loaded do not count.
    """
    # A trainer may put what it does not train into evaluation mode.
    trained = _above_trainable(unwrapped)
    strategy = STRATEGIES.get(names.cell.strategy)
    evaluating: list[str] = []
    for module in snapshot.evaluating:
        # ``canonical`` returns the name in the unwrapped model: without the prefixes of wrappers.
        name = strategy.canonical(module, names.cell, trained)
        if name in trained and name not in unwrapped.evaluating:
            evaluating.append(name)
    if not evaluating:
        return
    modules = f"module {and_others(evaluating)} is"
    if "" in evaluating:
        modules = "the whole model is"
    yield f"{modules} in evaluation mode in step 1; in training mode when loaded"


def _above_trainable(unwrapped: UnwrappedInfo) -> set[str]:
    """Return the names of all modules that have a trainable parameter, in them or in a child.

    The name of the root is empty.
    """
    modules: set[str] = set()
    for info in unwrapped.parameters:
        if not info.trainable:
            continue
        name = info.name
        while name:
            name = module_of(name)
            modules.add(name)
    return modules
