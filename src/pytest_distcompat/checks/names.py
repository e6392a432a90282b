"""Check ``names``: tensors have the names and shapes of the unwrapped model.

The unwrapped model is the model before anything wraps it. Its names are those that users load by.
A wrapper may change them: ``module.lm_head.weight`` under DDP. The name that a wrapped model has
for a parameter is its *live* name.

``judge.judge`` calls the check once the run ``train`` has ended. It gets a cell, one point of the
test matrix such as ``fsdp2-bf16_upcast-w2``, and a trace: for each rank and each action of the run
(``build_model``, ``build``, ``step``, ``save``, ``files``) a snapshot, what the rank recorded after
it. The check yields findings, such as ``rank 0: live parameter 'net.lm_head.weight' maps to
'net.lm_head.weight', which is no name of the unwrapped model``; none if all is right.

This file compares what is in memory: the values that ranks start from, live parameters and buffers,
and optimizer state. ``_saved_names`` compares the saved files. ``ExpectedNames`` knows which names
are right: ``unwrapped_name`` returns the unwrapped name for a live one, ``first_name`` the first of
several names of one tied tensor; ``parameters``, ``trainable`` and ``updated`` are sets of names.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Snapshots, check, every_rank
from pytest_distcompat.checks._expected_names import ExpectedNames
from pytest_distcompat.checks._saved_names import wrong_names_in_files
from pytest_distcompat.cost import BYTES
from pytest_distcompat.digests import EMPTY
from pytest_distcompat.model_values import (
    across_stages,
    expert_parts,
    flat_parameters,
    unused,
    values,
)
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.trace import OptimizerInfo, ParameterInfo, RunTrace, Snapshot, Trace
from pytest_distcompat.wording import and_others, named_ranks


@check(scenario=TRAIN, until=(("train", "files", 0),), order=1)
def names(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that names and shapes are the unwrapped model's, in memory and in every saved file.

    Optimizer state has these names too. A file has every parameter and persistent buffer, or all
    names that the model's library writes in place of them. Building keeps the values of buffers;
    ranks whose ``build_model`` gave other values have those of rank 0 after it. An adapter may have
    PEFT's names (https://huggingface.co/docs/peft/developer_guides/checkpoint).

    If it fails: look for an extra segment (``_orig_mod``, ``module``,
    ``_checkpoint_wrapped_module``) and save with ``get_model_state_dict``, which removes it. For a
    wrapper of the trainer's own set ``self.model`` to the model inside it.
    """
    run = trace.run()
    if run.unwrapped is None:
        yield "the unwrapped model was not recorded"
        return
    # The parameters that three steps do not update have no optimizer state.
    expected = ExpectedNames(cell, run.unwrapped, unused(run))
    yield from _unlike_initial_models(cell, run)
    for snapshot in run.at("build"):
        yield from _changed_buffers(expected, snapshot)
    trained = run.trained
    for snapshot in trained:
        yield from _live_parameters(expected, snapshot)
    yield from _without_live_counterpart(expected, run)
    yield from every_rank(trained, cell.world_size, "three steps")
    yield from _optimizer_state(expected, trained)
    yield from wrong_names_in_files(expected, trace)


def _unlike_initial_models(cell: Cell, run: RunTrace) -> Iterator[str]:
    """Yield a finding if ``build_model`` gave ranks unlike models, and they do not hold rank 0's.

    DDP sends rank 0's model to all ranks. FSDP2 does not: each rank shards its own model, so the
    whole is made of parts of unlike models, and no rank can see that. So the tensors that ranks
    hold together after the build are compared with rank 0's.
    """
    digests_by_name = _initial_digests(run)
    unlike: set[str] = set()
    for name, digest_by_rank in digests_by_name.items():
        digests = set(digest_by_rank.values())
        if 0 in digest_by_rank and len(digests) > 1:
            unlike.add(name)
    # Under DeepSpeed's expert parallelism each rank has experts of its own, so that models should
    # be unlike.
    if not unlike or cell.option("ep") != 1:
        return
    initial_dtypes: dict[str, str] = {}
    if run.unwrapped:
        initial_dtypes = {info.name: info.dtype for info in run.unwrapped.parameters}
    # Digests of whole tensors, combined from what all ranks hold.
    built = values(run, run.at("build"))
    built_digests = built.of("parameter")
    built_dtypes = built.dtypes["parameter"]
    wrong: list[str] = []
    for name in unlike & built_digests.keys():
        if _narrower(built_dtypes[name], initial_dtypes[name]):
            # Values that the build has rounded cannot be compared bit by bit.
            continue
        digest_on_rank_0 = digests_by_name[name][0]
        # One digest: all copies of the tensor are equal. If not, there are several.
        if built_digests[name] != (digest_on_rank_0,):
            wrong.append(name)
    if wrong:
        problem = (
            f"build_model() gives each rank other values of {and_others(wrong)}, "
            "and build() not those of rank 0 to all"
        )
        yield f"{problem}: ranks hold parts of unlike models; seed all alike, or broadcast"


def _initial_digests(run: RunTrace) -> Mapping[str, Mapping[int, str]]:
    """Return name of a parameter -> rank -> digest of the value that ``build_model`` gave it.

    A digest is a hash of the values of a tensor.
    """
    digests: dict[str, dict[int, str]] = defaultdict(dict)
    for snapshot in run.at("build_model"):
        if snapshot.unwrapped is None:
            continue
        for info in snapshot.unwrapped.parameters:
            # A parameter on the meta device has no values. One that was sharded while it was loaded
            # has only a part of them.
            has_values = info.digest not in {"", EMPTY}
            is_full = info.local_numel == math.prod(info.shape)
            if has_values and is_full:
                digests[info.name][snapshot.rank] = info.digest
    return digests


def _narrower(dtypes: Iterable[str], than: str) -> bool:
    """Tell whether any of the dtypes has fewer bytes an element than ``than``.

    An unknown dtype counts as narrower.
    """
    sizes = [BYTES.get(dtype, 0) for dtype in dtypes]
    return min(sizes, default=math.inf) < BYTES.get(than, 4)


def _changed_buffers(expected: ExpectedNames, snapshot: Snapshot) -> Iterator[str]:
    """Yield findings for buffers that have other values right after the build than before it.

    A buffer in another dtype is left to the check ``dtypes``.
    """
    live_buffers: dict[str, ParameterInfo] = {}
    for info in snapshot.buffers:
        live_buffers[expected.unwrapped_name(info.name)] = info
    for unwrapped in expected.unwrapped.buffers:
        live = live_buffers.get(expected.first_name(unwrapped.name))
        if live is None or live.dtype != unwrapped.dtype:
            continue
        # A buffer on the meta device has no values to compare.
        if unwrapped.digest == EMPTY and 0 not in unwrapped.shape:
            continue
        if live.digest != unwrapped.digest:
            persistent = "persistent" if unwrapped.persistent else "non-persistent"
            yield (
                f"rank {snapshot.rank}: buffer {unwrapped.name!r} ({persistent}) "
                "has other values after build than in the unwrapped model"
            )


def _live_parameters(expected: ExpectedNames, snapshot: Snapshot) -> Iterator[str]:
    """Yield findings for live parameters with names or shapes that the model does not have."""
    where = f"rank {snapshot.rank}"
    if snapshot.model is None:
        yield f"{where}: no model to read names from"
        return
    if flat_parameters((snapshot,)):
        # FSDP1 without ``use_orig_params`` joins many parameters into a FlatParameter, which has no
        # name of theirs. Their names are checked in the files.
        return
    live_by_name: dict[str, list[str]] = defaultdict(list)
    for info in snapshot.parameters:
        name = expected.unwrapped_name(info.name)
        live_by_name[name].append(info.name)
    for name in sorted(live_by_name.keys() - expected.parameters):
        last_live = live_by_name[name][-1]
        yield (
            f"{where}: live parameter {last_live!r} maps to {name!r}, "
            "which is no name of the unwrapped model"
        )
    for name in sorted(live_by_name):
        count = len(live_by_name[name])
        if count > 1:
            yield f"{where}: {count} live parameters map to {name!r}; expected one"
    for info in snapshot.parameters:
        # A shard of FSDP1 does not say the shape of the whole parameter.
        if info.kind == "FSDP1 shard":
            continue
        shape = expected.shape(info.name)
        live_shape = tuple(info.shape)
        if shape not in {None, live_shape}:
            yield (
                f"{where}: live parameter {info.name!r} has shape {info.shape}; "
                f"{shape} in the unwrapped model"
            )


def _without_live_counterpart(expected: ExpectedNames, run: RunTrace) -> Iterator[str]:
    """Yield findings for parameters and buffers that no rank of a copy of the model has.

    Usually each rank has all names. Under pipeline parallelism the ranks of one pipeline have them
    together, and under DeepSpeed's expert parallelism the ranks of one group of experts.
    """
    trained: dict[int, Snapshot] = {}
    for snapshot in run.trained:
        if snapshot.model:
            trained[snapshot.rank] = snapshot
    built = {snapshot.rank: snapshot for snapshot in run.at("build")}
    expected_buffers = expected.first_names_of(expected.unwrapped.buffers)
    expert_groups = [_ranks_with_its_experts(snapshot) for snapshot in trained.values()]
    # The ranks that hold one copy of the model: those of a group of experts, usually a single rank,
    # and those of the other stages of their pipelines.
    for ranks in across_stages(run, expert_groups):
        parameters: list[ParameterInfo] = []
        for snapshot in _of_ranks(trained, ranks):
            parameters += snapshot.parameters
        buffers: list[ParameterInfo] = []
        for snapshot in _of_ranks(built, ranks):
            buffers += snapshot.buffers
        # As if of 0 ranks, so that the words are never "all ranks".
        where = named_ranks(ranks, 0)
        problem = "of the unwrapped model has no live counterpart"
        if len(ranks) > 1:
            problem += " on any stage"
        kinds = {info.kind for info in parameters}
        # FSDP1's FlatParameter has no names of the parameters in it.
        if "FlatParameter" not in kinds:
            for name in _absent(expected, expected.parameters, parameters):
                yield f"{where}: parameter {name!r} {problem}"
        for name in _absent(expected, expected_buffers, buffers):
            yield f"{where}: buffer {name!r} {problem}"


def _of_ranks(snapshots: Mapping[int, Snapshot], ranks: Iterable[int]) -> list[Snapshot]:
    """Return the snapshots of these ranks; a rank without a snapshot is left out."""
    return [snapshots[rank] for rank in ranks if rank in snapshots]


def _absent(expected: ExpectedNames, names: set[str], live: Iterable[ParameterInfo]) -> list[str]:
    """Return the unwrapped names that none of the live tensors maps to, sorted."""
    return sorted(names - expected.unwrapped_names_of(live))


def _ranks_with_its_experts(snapshot: Snapshot) -> tuple[int, ...]:
    """Return the ranks that hold all experts together with this rank, itself included.

    It is this rank alone if experts are not spread over ranks.
    """
    ranks = {snapshot.rank}
    for info in snapshot.parameters:
        # Over how many ranks expert parallelism spreads the experts; 1 for other parameters.
        if expert_parts(info) > 1:
            ranks.update(info.layout.holders)
    return tuple(sorted(ranks))


def _optimizer_state(expected: ExpectedNames, trained: Snapshots) -> Iterator[str]:
    """Yield findings for names of optimizer state.

    They are those of all ranks together: a rank has no state for a parameter of which it holds no
    element.
    """
    owners: set[str] = set()
    for snapshot in trained:
        if snapshot.optimizer is None:
            yield f"rank {snapshot.rank}: no optimizer to read names from"
            return
        owners |= _state_owners(snapshot, snapshot.optimizer)
    # FSDP1's FlatParameter has no names of the parameters in it.
    if flat_parameters(trained) or not _has_state(trained):
        return
    if _state_under_one_parameter(trained):
        return
    # ``updated`` are the parameters for which an optimizer must have state, ``trainable`` those for
    # which it may.
    names = {expected.unwrapped_name(owner) for owner in owners}
    for name in sorted(expected.updated - names):
        yield f"the optimizer of no rank keeps state for {name!r}"
    for name in sorted(names - expected.trainable):
        yield (
            f"the optimizer keeps state for {name!r}, "
            "which is no trainable parameter of the unwrapped model"
        )


def _state_owners(snapshot: Snapshot, optimizer: OptimizerInfo) -> set[str]:
    """Return the live names of parameters for which this rank's optimizer has state.

    ZeRO's optimizer keeps the state of many parameters flattened, in a partition (owner
    ``partition 0``). ``optimizer.partitioned`` maps each live name to the number of its elements
    there.
    """
    owners: set[str] = set()
    for state in snapshot.states:
        if not state.owner.startswith("partition "):
            owners.add(state.owner)
    for name, numel in optimizer.partitioned.items():
        if numel:
            owners.add(name)
    return owners


def _has_state(snapshots: Snapshots) -> bool:
    """Tell whether any rank's optimizer keeps state; SGD without momentum keeps none."""
    for snapshot in snapshots:
        optimizer = snapshot.optimizer
        if optimizer and (optimizer.states or optimizer.partitioned):
            return True
    return False


def _state_under_one_parameter(snapshots: Snapshots) -> bool:
    """Tell whether the optimizer keeps the state of all parameters under one, as LBFGS does.

    Such state has more elements than the parameter that owns it.
    """
    for snapshot in snapshots:
        numel_by_name = {info.name: info.local_numel for info in snapshot.parameters}
        for state in snapshot.states:
            owner_numel = numel_by_name.get(state.owner)
            if owner_numel is None:
                continue
            if state.numel > max(1, owner_numel):
                return True
    return False
