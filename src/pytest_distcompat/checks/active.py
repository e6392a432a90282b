"""Check ``active``: the strategy that the cell names really runs.

A trainer that falls back to something else in silence would pass most other checks: accelerate, for
example, runs DDP in place of FSDP on the CPU.

``judge.judge`` calls the check once the run has ended. It gets a cell, one point of the test matrix
(``fsdp2-bf16_upcast-w2``: strategy, precision, 2 ranks), and a trace. The trace has the run
``train`` (one process group from start to end) as snapshots: what one rank recorded of its model
after one action, such as ``build`` or ``step``. The check yields findings, such as ``rank 0:
LlamaForCausalLM runs as DDP x 1; expected FSDP2 for fsdp2``; none if all is right.

It looks at five things. This file has the first, the third and the last of them:

- after the build, on each rank: wrapper, ZeRO stage, kind of parameters, size of the process group,
  and parts of the model on a mesh (``_model_parallel``);
- after the build, over ranks: how many copies of the parameters they store (``_stored``);
- in the third step: whether gradients were reduced;
- after three and after 20 steps: whether replicas are equal (``_replicas``);
- after three steps: whether torch's settings are those of before the build.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Snapshots, check, every_rank, with_rank
from pytest_distcompat.checks._model_parallel import (
    blocks_of_whole_layers,
    missing_context_parallelism,
    missing_sequence_parallelism,
    wrong_model_parallelism,
    wrong_pipeline,
    wrong_secondary_partition,
)
from pytest_distcompat.checks._reductions import gradient_reductions
from pytest_distcompat.checks._replicas import unlike_replicas
from pytest_distcompat.checks._stored import ignored_predicate, wrongly_stored_parameters
from pytest_distcompat.cost import trained_elements
from pytest_distcompat.model_values import by_stage, unused
from pytest_distcompat.scenario import STEPS, TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import (
    ModelInfo,
    ParameterInfo,
    RunTrace,
    Snapshot,
    Trace,
    UnwrappedInfo,
)

#: A rank reduced its gradients if it reduced at least this part of the number of trainable
#: elements. Compressed gradients are still more. Metrics and norms, also reduced, are less.
MIN_REDUCED_FRACTION = 0.1


@check(scenario=TRAIN, until=(("train", "step", 2),), order=0)
def active(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the strategy really runs.

    Wrapper, kind of parameters, ZeRO stage, world size, shards and tensor-parallel parts are the
    strategy's. Gradients are reduced. Sequence parallelism cuts what lies between layers; under
    context parallelism attention sees all parts of a sequence; a secondary partition of ZeRO++ is
    there. Replicas of parameters, optimizer state and gradients stay equal, also after the last
    step. torch's settings of the process, such as its threads, stay as they were where the driver
    ``keeps_settings``. On one rank DDP may be left out, and FSDP1 does not shard.

    If it fails: the stack silently ran something else, as accelerate runs DDP instead of FSDP on
    the CPU.
    """
    run = trace.run()
    built = run.at("build")
    # A finding about ranks without a snapshot.
    yield from every_rank(built, cell.world_size, "build")
    for snapshot in built:
        yield from with_rank(snapshot, _after_build(cell, run, snapshot))
    # A stage is a part of the layers that pipeline parallelism puts on some ranks. Without a
    # pipeline there is one stage: all ranks, and the whole unwrapped model (the model before
    # anything wraps it).
    for stage_snapshots, stage_model in by_stage(run, built):
        # A stage without any parameter is a finding of ``wrong_pipeline`` already.
        if stage_model is run.unwrapped or _have_parameters(stage_snapshots):
            yield from wrongly_stored_parameters(cell, run, stage_snapshots, stage_model)
    # The snapshots after the third step.
    trained = run.trained
    yield from every_rank(trained, cell.world_size, "three steps")
    # If all ranks hold parts of one copy of the model, there is no peer to reduce gradients with.
    if cell.world_size > cell.tp * cell.pp:
        for stage_snapshots, stage_model in by_stage(run, trained):
            yield from _reductions(cell, run, stage_snapshots, stage_model)
    for snapshot in trained:
        yield from with_rank(snapshot, _after_steps(cell, snapshot))
    yield from _changed_settings(cell, run)
    differing_replicas = list(unlike_replicas(run, trained, "three steps"))
    if not differing_replicas:
        # Also after all steps: a rank may skip one, or leave DDP, at any time.
        last = run.at("step", STEPS - 1)
        differing_replicas = list(unlike_replicas(run, last, f"{STEPS} steps"))
    yield from differing_replicas


def _changed_settings(cell: Cell, run: RunTrace) -> Iterator[str]:
    """Yield a finding for each setting of a rank's torch that the trainer has changed for good.

    What the user computes beside the training would follow it. A cell with settings of libraries
    may ask for it. Settings are recorded only of a driver that must keep them
    (``Driver.keeps_settings``).
    """
    if any(not setting.startswith("env.") for setting in cell.set):
        return
    before = {snapshot.rank: snapshot.settings for snapshot in run.at("build_model")}
    for snapshot in run.trained:
        for name, value in snapshot.settings.items():
            expected = before.get(snapshot.rank, {}).get(name, value)
            if value != expected:
                changed = f"torch's setting {name!r} is {value} after three steps"
                yield f"rank {snapshot.rank}: {changed}; {expected} before the build"


def _have_parameters(snapshots: Iterable[Snapshot]) -> bool:
    """Tell whether any of the ranks has a parameter."""
    return any(snapshot.parameters for snapshot in snapshots)


def _after_build(cell: Cell, run: RunTrace, snapshot: Snapshot) -> Iterator[str]:
    """Yield texts about a rank's model that is not as expected right after the build."""
    model = snapshot.model
    if model is None:
        yield "no model after build; the driver must set self.model"
        return
    # If tensor parallelism takes all ranks, a wrapper is optional: nothing is left to shard.
    if not cell.only_tp or model.wrappers:
        yield from _wrapping(cell, run, model)
    if model.world_size != cell.world_size:
        yield f"the process group has {model.world_size} ranks; expected {cell.world_size}"
    trainer_world_size = model.trainer_world_size
    if trainer_world_size not in {None, cell.world_size}:
        yield f"the trainer believes in {trainer_world_size} ranks; expected {cell.world_size}"
    yield from wrong_model_parallelism(cell, run.unwrapped, snapshot)
    yield from blocks_of_whole_layers(cell, run, snapshot)
    yield from wrong_pipeline(cell, run.unwrapped, model)


def _after_steps(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield texts about parallelism that did not show in a rank's third step."""
    yield from missing_sequence_parallelism(cell, snapshot)
    yield from missing_context_parallelism(cell, snapshot)
    yield from wrong_secondary_partition(cell, snapshot)


def _wrapping(cell: Cell, run: RunTrace, model: ModelInfo) -> Iterator[str]:
    """Yield texts about a wrapper, ZeRO stage or kind of parameters that is not the strategy's.

    ``model.wrappers`` counts wrappers by name: ``{"FSDP2": 3}``.
    """
    strategy = STRATEGIES.get(cell.strategy)
    yield from _other_wrappers(cell, model)
    if model.zero_stage != strategy.zero_stage:
        yield f"ZeRO stage {model.zero_stage} is running; expected {strategy.zero_stage}"
    yield from _other_kinds(cell, run, model)


def _other_wrappers(cell: Cell, model: ModelInfo) -> Iterator[str]:
    """Yield a text if the model is not in the strategy's wrapper, or in others too."""
    strategy = STRATEGIES.get(cell.strategy)
    # On one rank nothing is to be reduced, so a library may leave out DDP.
    may_be_bare = cell.world_size == 1 and strategy.bare_alone
    # ``OptimizedModule`` is torch.compile's wrapper, which is no strategy. Any further wrapper is
    # wrong: a DeepSpeed engine, for example, must not hold torch's DDP.
    others = set(model.wrappers) - {strategy.wrapper, "OptimizedModule"}
    if strategy.wrapper in model.wrappers:
        if others:
            names = ", ".join(sorted(others))
            yield f"also wrapped by {names}; expected {strategy.wrapper} alone"
    elif others or not may_be_bare:
        wrappers: list[str] = []
        for wrapper, count in model.wrappers.items():
            wrappers.append(f"{wrapper} x {count}")
        running = ", ".join(wrappers) or "a bare model"
        expected = f"expected {strategy.wrapper} for {strategy.name}"
        yield f"{model.type} runs as {running}; {expected}"


def _other_kinds(cell: Cell, run: RunTrace, model: ModelInfo) -> Iterator[str]:
    """Yield a text if parameters are of another kind than the strategy's.

    Kinds are ``Tensor``, ``DTensor`` (FSDP2), ``FSDP1 shard``, ``FlatParameter`` (FSDP1 without
    ``use_orig_params``: one tensor of many parameters) and ``ZeRO-3``.
    """
    strategy = STRATEGIES.get(cell.strategy)
    # Only FSDP1 makes flat parameters; under another strategy its wrapper is a finding already.
    kinds = {strategy.kind, "FlatParameter"}
    # On one rank a strategy may leave parameters of another kind, as it shards nothing.
    if cell.world_size == 1 and strategy.kind_alone:
        kinds.add(strategy.kind_alone)
    # Whether a parameter is in a module that the cell's option ``ignored_modules`` leaves out of
    # the sharding.
    is_ignored = ignored_predicate(cell, run)
    others: list[ParameterInfo] = []
    for info in model.parameters:
        if info.kind in kinds or is_ignored(info.name):
            continue
        others.append(info)
    parameters = len(model.parameters)
    finding = f"{len(others)} of {parameters} parameters are not of kind {strategy.kind}"
    if others:
        first = others[0]
        yield f"{finding}, {first.name!r} is a {first.kind}"
    # ``wrong_pipeline`` reports a stage without parameters.
    elif not parameters and not model.pp_ranks:
        yield f"{finding}, there is none"


def _reductions(
    cell: Cell, run: RunTrace, trained: Snapshots, unwrapped: UnwrappedInfo | None
) -> Iterator[str]:
    """Yield a finding for each rank that reduced no gradients in the third step, or too few.

    Args:
        cell: The cell.
        run: The run.
        trained: The snapshots of the ranks of one pipeline stage, after the third step.
        unwrapped: The part of the unwrapped model that this stage has.
    """
    # Parameters that the loss does not depend on have no gradient to reduce.
    without_gradient = unused(run)
    trainable = trained_elements(unwrapped)
    if trained:
        for info in trained[0].parameters:
            if info.name in without_gradient:
                trainable -= math.prod(info.shape)
    for snapshot in trained:
        # Tensor parallelism splits the elements among ``tp`` ranks.
        yield from with_rank(snapshot, _reduced(cell, snapshot, trainable // cell.tp))


def _reduced(cell: Cell, snapshot: Snapshot, trainable: int) -> Iterator[str]:
    """Yield a text if a rank reduced much less in a step than its number of trainable elements.

    Args:
        cell: The cell.
        snapshot: The rank's snapshot after the step, with the collectives of that step.
        trainable: The number of trainable elements of which the rank has gradients.
    """
    is_reducing = False
    reduced = 0
    for info in gradient_reductions(cell, snapshot):
        is_reducing = True
        reduced += info.calls * info.numel
    if not is_reducing:
        ops = sorted({info.op for info in snapshot.collectives})
        listed_ops = ", ".join(ops) or "none"
        collectives = f"(collectives: {listed_ops})"
        yield f"no gradient was reduced in a step {collectives}; ranks train on their own"
        return
    if reduced < MIN_REDUCED_FRACTION * trainable:
        elements = f"only {reduced} elements were reduced in a step, of {trainable} trainable ones"
        yield f"{elements}; that is no gradient, ranks train on their own"
