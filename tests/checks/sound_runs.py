"""Hand-made traces of train, resume and reference: what the probes write in any cell when nothing is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.checks.accumulation import SINGLE_RUN
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import REFERENCE_RUN, RESUME_RUN, STEPS, TRAIN_RUN, Run
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import (
    FLAT,
    CollectiveInfo,
    FileInfo,
    GradientInfo,
    Layout,
    MeshDim,
    ModelInfo,
    OptimizerInfo,
    ParameterInfo,
    RunTrace,
    Snapshot,
    StateInfo,
    StepInfo,
    Trace,
    UnwrappedInfo,
)
from pytest_distcompat.worker import OBSERVED_STEP, WHOLE_STEPS

#: Even sizes, so that halves are halves; one frozen parameter; one name that is tied to another.
SHAPES = {"inlet.weight": (4, 2), "frozen.weight": (4, 4), "outlet.weight": (2, 4)}
TRAINABLE = ("inlet.weight", "outlet.weight")
TIED = ("inlet.weight", "head.weight")
#: State that AdamW keeps for each element.
MOMENTS = ("exp_avg", "exp_avg_sq")
SAVED = (*SHAPES, "head.weight", "scale")
#: What tensor parallelism cuts, and how.
CUT = {"inlet.weight": "Shard(0)", "outlet.weight": "Shard(1)"}
#: What FSDP cuts out, and what option ``ignored`` leaves out.
BLOCKS = ("inlet", "outlet")
IGNORED = ("frozen",)
RUNS = (TRAIN_RUN, RESUME_RUN, REFERENCE_RUN)
#: What a strategy puts before the names of a model; others put ``module.``.
PREFIXES = {"fsdp1": "_fsdp_wrapped_module.", "fsdp2": ""}
#: How many blocks a way to compile them compiles; others compile none of them by itself.
COMPILED_BLOCKS = {"regional": 2, "partial": 1}
#: Neither gradients of a norm nor of a flag, nor gathered parameters: none must be taken for reduced gradients.
NO_GRADIENTS = (
    CollectiveInfo("allreduce", "float64", 1, 1, 1),
    CollectiveInfo("allreduce", "int64", 1, 16, 16),
    CollectiveInfo("allgather_base", "float16", 1, 16, 16),
)


def trace_of(cell: Cell) -> Trace:
    """The three runs; where gradients are accumulated, a fourth in which they are not."""
    runs = (*RUNS, SINGLE_RUN) if cell.option("grad_accum") != 1 else RUNS
    return Trace.of("hand-made", [_run(cell, run) for run in runs])


def live_name(cell: Cell, name: str) -> str:
    """How a parameter or a module of the unwrapped model is called in this cell."""
    front = PREFIXES.get(cell.strategy, "module.")
    if _wrapped_by_compile(cell):
        front = "_orig_mod." + front
    module, _, last = name.partition(".")
    if not last:
        return front + module
    if cell.option("activation_checkpointing") and module in BLOCKS:
        module += "._checkpoint_wrapped_module"
    return f"{front}{module}.{last}"


def _wrapped_by_compile(cell: Cell) -> bool:
    return cell.option("compile") in {True, "aot_eager"}


def _run(cell: Cell, run: Run) -> RunTrace:
    run_cell = run.cell(cell)
    snapshots = []
    done = run.first_step
    for index, action in enumerate(run.actions):
        done += action in {"step", "reference"}
        # The reference speaks for the ranks of the cell.
        current = cell if run == REFERENCE_RUN else run_cell
        for rank in range(run_cell.world_size):
            snapshots.append(_snapshot(current, run, index, done, rank))
    return RunTrace(run.name, run_cell.world_size, tuple(snapshots), cell=run_cell.id)


def _snapshot(cell: Cell, run: Run, index: int, done: int, rank: int) -> Snapshot:
    """``done`` counts the optimizer steps so far; a run that resumes has none of its own until it loaded."""
    action = run.actions[index]
    if run.after and action == "build":
        done = 0
    snapshot = Snapshot(rank, run.name, action, index)
    if action == "build_model":
        return replace(snapshot, unwrapped=_unwrapped(cell))
    if action == "files":
        # Rank 0 reads the files for all.
        return replace(snapshot, files=_files()) if rank == 0 else snapshot
    if action == "evaluate":
        return snapshot
    optimizer = _optimizer(cell, done, rank)
    if action == "reference":
        # The mean of what the ranks say.
        loss = 1 / done + (cell.dp_size - 1) / 2
        steps = (_reference_step(),)
        return replace(snapshot, loss=loss, grad_norm=2.0, optimizer=optimizer, steps=steps)
    snapshot = replace(snapshot, scheduler=f"last_epoch={done}", memory=2**20)
    if action == "step":
        snapshot = _stepped(snapshot, cell, done)
        if run.first_step or (done != OBSERVED_STEP and cell.option("grad_accum") == 1):
            # Of others the probe sees no single operators.
            snapshot = replace(snapshot, float8=0, collectives=())
        if run.first_step + WHOLE_STEPS < done < STEPS:
            # Of later steps but the last the probe reads numbers only.
            numbers = OptimizerInfo(("AdamW",), 0, param_groups=optimizer.param_groups)
            return replace(snapshot, optimizer=numbers)
    scaler = {"scale": 1024.0} if PRECISIONS.get(cell.precision).scaled else {}
    model = _model(cell, done, rank)
    return replace(snapshot, model=model, optimizer=optimizer, rng=f"random after {done}", scaler=scaler)


def _reference_step() -> StepInfo:
    gradients = tuple(GradientInfo(name, 8, 0.5) for name in TRAINABLE)
    return StepInfo("AdamW", ("float32",), ("float32",), ("float32",), square=1.0, gradients=gradients)


def _stepped(snapshot: Snapshot, cell: Cell, number: int) -> Snapshot:
    """The snapshot with what a step took and computed; steps are counted from 1."""
    rank = snapshot.rank
    batches = _batches(cell, number, rank)
    micros = len(batches)
    float8 = 0
    if PRECISIONS.get(cell.precision).float8:
        # Both factors of the product of two layers.
        float8 = 4 * micros
    return replace(
        snapshot,
        loss=1 / number + cell.dp_rank(rank),
        grad_norm=2.0,
        inputs=batches,
        tokens=8 * micros,
        float8=float8,
        **_watched(cell, micros, rank),
    )


def _batches(cell: Cell, number: int, rank: int) -> tuple[str, ...]:
    """The digests of the micro-batches of a step; every eighth step is the end of an epoch, of one micro-batch."""
    micros = 1 if number % 8 == 0 else int(cell.option("grad_accum"))
    part = ""
    if cell.cp > 1:
        part = f", part {cell.cp_peers(rank).index(rank)}"
    batches = []
    for micro in range(micros):
        batches.append(f"batch {number}.{micro} of rank {cell.dp_rank(rank)}{part}")
    return tuple(batches)


def _unwrapped(cell: Cell) -> UnwrappedInfo:
    load = PRECISIONS.get(cell.precision).load
    parameters = tuple(
        ParameterInfo(name, shape, load, name in TRAINABLE, local_numel=math.prod(shape))
        for name, shape in SHAPES.items()
    )
    ignored = IGNORED if cell.option("ignored_modules") else ()
    return UnwrappedInfo(
        parameters,
        (_scale(),),
        SAVED,
        (TIED,),
        blocks=BLOCKS,
        ignored_modules=ignored,
        linears=3,
        obeyed=tuple(OPTIONS),
    )


def _scale() -> ParameterInfo:
    return ParameterInfo("scale", (4,), "float32", False, persistent=True, local_numel=4, digest="scale")


def _model(cell: Cell, done: int, rank: int) -> ModelInfo:
    strategy = STRATEGIES.get(cell.strategy)
    precision = PRECISIONS.get(cell.precision)
    blocks = tuple(live_name(cell, block) for block in BLOCKS)
    method = cell.option("compile")
    wrappers = {strategy.wrapper: 1}
    compiled = blocks[: COMPILED_BLOCKS.get(str(method), 0)]
    if _wrapped_by_compile(cell):
        wrappers["OptimizedModule"] = 1
        compiled = ("",)
    buffer_dtype = strategy.dtypes(precision).buffer or "float32"
    units: tuple[str, ...] = ()
    if strategy.wrapper.startswith("FSDP"):
        units = ("", *blocks)
    checkpointed: tuple[str, ...] = ()
    if cell.option("activation_checkpointing"):
        checkpointed = blocks
    return ModelInfo(
        "Toy",
        wrappers,
        tuple(_parameter(cell, name, done, rank) for name in SHAPES),
        (replace(_scale(), dtype=buffer_dtype),),
        world_size=cell.world_size,
        trainer_world_size=cell.world_size,
        zero_stage=strategy.zero_stage,
        units=units,
        checkpointed=checkpointed,
        compiled=compiled,
        float8=2 * precision.float8,
        graphs=int(bool(method)),
    )


def _parameter(cell: Cell, name: str, done: int, rank: int) -> ParameterInfo:
    """A live parameter after so many steps: the shard of this rank, if the strategy shards it."""
    strategy = STRATEGIES.get(cell.strategy)
    precision = PRECISIONS.get(cell.precision)
    trained = name in TRAINABLE
    dtype = strategy.dtypes(precision).storage if trained else precision.load
    times_in_optimizer = None if strategy.flat_masters else int(trained)
    info = ParameterInfo(live_name(cell, name), SHAPES[name], dtype, trained, strategy.kind)
    info = replace(info, held=times_in_optimizer)
    digest = f"{name} after {done * trained}"
    numel = math.prod(SHAPES[name])
    if strategy.shards and not _is_ignored(cell, name):
        shard = layout(cell, rank, name)
        shard_numel = numel // holders_of(cell, name)
        digest = f"{digest} of {shard.region}"
        return replace(info, local_numel=shard_numel, digest=digest, layout=shard)
    kind = "Tensor" if strategy.kind == "DTensor" else strategy.kind
    return replace(info, kind=kind, local_numel=numel, digest=digest, layout=Layout())


def _is_ignored(cell: Cell, name: str) -> bool:
    """Tell whether FSDP leaves the module of this parameter out."""
    module = name.partition(".")[0]
    return bool(cell.option("ignored_modules")) and module in IGNORED


def shared_by(cell: Cell) -> int:
    """Over how many ranks data parallelism shards."""
    return cell.world_size // cell.tp // int(cell.option("dp_replicate"))


def holders_of(cell: Cell, name: str) -> int:
    """How many ranks hold a copy of the parameter."""
    if name in CUT:
        return shared_by(cell) * cell.tp
    return shared_by(cell)


def layout(cell: Cell, rank: int, name: str = "") -> Layout:
    """The shard of a rank: neighbours hold a copy, as a mesh of copies, shards and parts of tensor parallelism has them."""
    size = shared_by(cell)
    tp_rank = rank % cell.tp
    at = rank // cell.tp % size
    placement = "Shard(0)" if cell.strategy == "fsdp2" else FLAT
    first = rank - tp_rank - at * cell.tp
    copy = range(first, first + size * cell.tp)
    dims = [MeshDim("dp_shard", size, at, placement)]
    if name in CUT:
        holders = tuple(copy)
        if cell.tp > 1:
            dims.append(MeshDim("tp", cell.tp, tp_rank, CUT[name]))
    else:
        # One on each rank of tensor parallelism.
        holders = tuple(copy[tp_rank :: cell.tp])
    if len(holders) == 1:
        holders = ()
    return Layout(tuple(dims), holders)


def _optimizer(cell: Cell, done: int, rank: int) -> OptimizerInfo:
    strategy = STRATEGIES.get(cell.strategy)
    row = strategy.dtypes(PRECISIONS.get(cell.precision))
    names = [live_name(cell, name) for name in TRAINABLE]
    owners = dict(zip(names, TRAINABLE, strict=True))
    numel = 8
    keys: tuple[str, ...] = MOMENTS
    partitioned = {}
    if strategy.flat_masters:
        owners = {"partition 0": ""}
        numel = 16
        keys = ("master", *MOMENTS)
        partitioned = dict.fromkeys(names, 8 // cell.world_size)
    states = []
    for owner, name in owners.items():
        if not done:
            break
        part, holders = _shard(cell, rank, name)
        for key in keys:
            digest = f"{owner} {key} after {done} of {part.region}"
            states.append(StateInfo(owner, key, row.state, numel // holders, digest, part))
        states.append(StateInfo(owner, "step", row.state, 1, f"{owner} step after {done}"))
    return OptimizerInfo(
        ("AdamW",),
        len(owners),
        states=tuple(states),
        partitioned=partitioned,
        param_groups=({"lr": 0.1},),
    )


def _shard(cell: Cell, rank: int, name: str) -> tuple[Layout, int]:
    """The part of gradient and optimizer state of this rank, and on how many ranks there is one."""
    strategy = STRATEGIES.get(cell.strategy)
    if strategy.shards or strategy.flat_masters:
        return layout(cell, rank, name), holders_of(cell, name)
    return Layout(), 1


def _watched(cell: Cell, micros: int, rank: int) -> dict[str, Any]:
    strategy = STRATEGIES.get(cell.strategy)
    row = strategy.dtypes(PRECISIONS.get(cell.precision))
    op = "reduce_scatter_base" if strategy.shards else "allreduce"
    dtype = "float32" if cell.option("reduce_dtype") == "fp32" else row.reduce
    backwards = micros if strategy.reduces_each_micro_batch else 1
    reduction = CollectiveInfo(op, dtype, backwards, 16, 16 * backwards)
    collectives = (reduction, *NO_GRADIENTS, *_activations(cell, micros, rank))
    compute = () if cell.option("compile") else (row.compute,)
    # Clipped to 1.
    gradients = []
    for name in TRAINABLE:
        part, holders = _shard(cell, rank, name)
        gradients.append(GradientInfo(live_name(cell, name), 8 // holders, 0.5 / holders, part))
    all_of_them = gradients[0].layout.holders
    square = 1 / max(1, len(all_of_them))
    step = StepInfo(
        "AdamW",
        (row.master,),
        (row.gradient,),
        (row.state,),
        square,
        tuple(gradients),
        all_of_them,
    )
    return {"steps": (step,), "compute": compute, "collectives": collectives}


def _activations(cell: Cell, micros: int, rank: int) -> tuple[CollectiveInfo, ...]:
    """What ranks that are fed the same rows tell each other in forward and backward: four sums a micro-batch."""
    op = "reduce_scatter_tensor" if cell.option("sp") else "all_reduce"
    calls = 4 * micros
    numel = 256 * micros
    collectives = []
    if cell.tp > 1:
        collectives.append(CollectiveInfo(op, "float32", calls, 64, numel, cell.tp_peers(rank)))
    if cell.cp > 1:
        collectives.append(CollectiveInfo("all_gather_into_tensor", "float32", calls, 64, numel, cell.cp_peers(rank)))
    return tuple(collectives)


def _files() -> tuple[FileInfo, ...]:
    return (
        FileInfo("model.safetensors", "safetensors", "model", SAVED, {**SHAPES, "head.weight": (4, 2)}),
        FileInfo("optimizer.bin", "torch", "optimizer", TRAINABLE),
    )
