"""Check ``units``: the model is sharded, recomputed and compiled block by block.

A *block* is a module that repeats, such as a transformer layer. Three things should be done to each
block as a whole: FSDP makes a *unit* of it (it gathers and frees the parameters of one unit at a
time), activation checkpointing recomputes it in the backward pass, and ``compile=regional``
compiles it.

``judge.judge`` calls the check once the run has ended. It gets a cell, one point of the test matrix
such as ``fsdp2-fp32-w2-activation_checkpointing``, and a trace of the run ``train`` (one process
group from start to end) with a snapshot of each rank after three steps. The snapshot has the names
of the live modules that are units, recomputed or compiled. The check yields findings, such as
``rank 0: FSDP's units are the root; expected 'layers.0', 'layers.1', the root, and none inside a
block``.

The *unwrapped* model is the one before anything wraps it; its record says which blocks there are.
*Live* names are those of the wrapped model.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell does not have the check, or None.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, module_of, requested, with_rank
from pytest_distcompat.driver import Driver
from pytest_distcompat.model_values import by_stage
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ModelInfo, Snapshot, Trace, UnwrappedInfo

#: The wrappers, by their names in ``ModelInfo.wrappers``, that shard a model in units.
_WITH_UNITS = frozenset({"FSDP1", "FSDP2"})


def _why_no_units(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the check does not apply to the cell; None if it does."""
    if _has_units(cell):
        return None
    if cell.option("activation_checkpointing") or cell.option("compile"):
        return None
    return f"{cell.strategy} cuts no units, and nothing is recomputed or compiled"


def _has_units(cell: Cell) -> bool:
    """Tell whether the strategy shards a model unit by unit.

    FSDP gathers the parameters of one unit at a time.
    """
    return STRATEGIES.get(cell.strategy).wrapper in _WITH_UNITS


@check(scenario=TRAIN, until=(("train", "step", 2),), order=7, not_applicable=_why_no_units)
def units(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that FSDP, activation checkpointing and torch.compile apply to the model's blocks.

    Each block and the root is a unit; no child of a block is. Whole blocks are recomputed;
    selectively all but their matrix products. The driver or the model declares the blocks, as
    models of transformers do; unknown blocks are a finding.

    If it fails: compare the policy's class names with the model's. One unit for all gathers the
    whole model at once, one for each child costs a collective each.
    """
    run = trace.run()
    if run.unwrapped is None:
        yield "the unwrapped model was not recorded"
        return
    reason = _why_not_known(cell, run.unwrapped)
    if reason:
        yield reason
        return
    # The snapshots of all ranks after three steps.
    trained = run.trained
    yield from every_rank(trained, cell.world_size, "three steps")
    for snapshots, stage_model in by_stage(run, trained):
        for snapshot in snapshots:
            yield from with_rank(snapshot, _of_rank(cell, stage_model, snapshot))


def _of_rank(cell: Cell, unwrapped: UnwrappedInfo | None, snapshot: Snapshot) -> Iterator[str]:
    """Yield texts about modules of one rank's model.

    ``unwrapped`` is the record of the unwrapped model. Under pipeline parallelism it is the part of
    it that the rank's stage has.
    """
    if snapshot.model is None or unwrapped is None:
        yield "no model to read units from"
        return
    yield from _sharded_modules(cell, unwrapped, snapshot.model)
    yield from _recomputed_modules(cell, unwrapped, snapshot.model)
    yield from _compiled_modules(cell, unwrapped, snapshot.model)
    yield from _ignored_modules(cell, unwrapped, snapshot.model)
    yield from _recomputed_operators(cell, snapshot)


def _why_not_known(cell: Cell, unwrapped: UnwrappedInfo) -> str | None:
    """Return a finding if it is not known which modules are expected; None if it is known.

    The check must not pass then.
    """
    if cell.option("ignored_modules") and not unwrapped.ignored_modules:
        return "it is not known which module was to be left out of the sharding"
    if not _needs_blocks(cell):
        return None
    classes = " or ".join(repr(name) for name in unwrapped.block_classes)
    if "" in unwrapped.blocks:
        return (
            f"the whole model that was seen is one block, a {classes}: "
            "nothing wraps what is around it"
        )
    if unwrapped.blocks:
        return None
    reason = "it declares none (_no_split_modules)"
    if classes:
        reason = f"no module of it is a {classes}"
    hint = "name their classes by blocks= of launch, or blocks of the driver"
    return f"the model's blocks are not known: {reason}; {hint}"


def _needs_blocks(cell: Cell) -> bool:
    """Tell whether something is to be done block by block."""
    # Under the policy ``size`` a unit is whatever is large enough.
    if _has_units(cell) and cell.option("wrap_policy") != "size":
        return True
    if cell.option("compile") in {"regional", "partial"}:
        return True
    return bool(cell.option("activation_checkpointing"))


def _unwrapped_names(cell: Cell, unwrapped: UnwrappedInfo, live: Collection[str]) -> set[str]:
    """Return the unwrapped model's names of live modules; the name of the root is empty.

    ``layers.0`` for ``_fsdp_wrapped_module.layers.0``.
    """
    strategy = STRATEGIES.get(cell.strategy)
    known = {module_of(info.name) for info in unwrapped.parameters}
    known.update(unwrapped.blocks)
    # ``canonical`` removes the segments of wrappers from a live name.
    names: set[str] = set()
    for live_name in live:
        names.add(strategy.canonical(live_name, cell, known))
    return names


def _sharded_modules(cell: Cell, unwrapped: UnwrappedInfo, model: ModelInfo) -> Iterator[str]:
    """Yield a text unless FSDP's units are the blocks and the root.

    Modules outside of blocks, such as embeddings, may be units too. Modules inside may not.
    """
    if not _has_units(cell):
        return
    fsdp_units = _unwrapped_names(cell, unwrapped, model.units)
    # If tensor parallelism takes all ranks, FSDP has none to shard over, and may be left out.
    if cell.only_tp and not fsdp_units:
        return
    if cell.option("wrap_policy") == "size":
        if len(fsdp_units) < 2:
            yield (
                "FSDP has one unit for the whole model; "
                "expected one for each part that is large enough"
            )
        return
    inside_blocks = set()
    for unit in fsdp_units:
        if _is_inside(unit, unwrapped.blocks):
            inside_blocks.add(unit)
    # A model may declare a module inside a block to be a block too.
    inside_blocks -= set(unwrapped.blocks)
    inside_blocks -= _adapters(unwrapped)
    expected = set(unwrapped.blocks)
    # A rank of an interleaved pipeline has several stages. Each is wrapped as a model of its own,
    # so that no root is among the units.
    # With one stage a rank (or without a pipeline) the whole wrapped model, "", is the root.
    if cell.stages == cell.pp:
        expected.add("")
    # Embeddings and heads may be units of their own.
    if inside_blocks or not expected <= fsdp_units:
        yield (
            f"FSDP's units are {_listed(fsdp_units)}; "
            f"expected {_listed(expected)}, and none inside a block"
        )


def _adapters(unwrapped: UnwrappedInfo) -> set[str]:
    """Return the layers of LoRA adapters: trained modules in blocks that are frozen otherwise.

    They may be units although they are inside blocks.
    """
    # PEFT's policy for FSDP1 makes a unit of each, apart from the frozen ones:
    # https://huggingface.co/docs/peft/accelerate/fsdp.
    layers: set[str] = set()
    for block in unwrapped.blocks:
        trained: set[str] = set()
        has_frozen = False
        for info in unwrapped.parameters:
            if not info.name.startswith(f"{block}."):
                continue
            if info.trainable:
                trained.add(module_of(info.name))
            else:
                has_frozen = True
        if has_frozen:
            layers |= trained
    return layers


def _recomputed_modules(cell: Cell, unwrapped: UnwrappedInfo, model: ModelInfo) -> Iterator[str]:
    """Yield a text unless the activations of each block are recomputed.

    Without activation checkpointing, those of no block may be.
    """
    recomputed = _unwrapped_names(cell, unwrapped, model.checkpointed)
    # transformers also marks parents of blocks, by ``gradient_checkpointing``. What counts is
    # whether the blocks are marked.
    recomputed &= _blocks_and_modules_inside(unwrapped)
    if not cell.option("activation_checkpointing"):
        # A script may turn it on by itself. ``requested``: a driver that supports the option was
        # given the cell's value, also where that is the default, False.
        if recomputed and requested(cell, unwrapped, "activation_checkpointing"):
            yield (
                f"the activations of {_listed(recomputed)} "
                "are recomputed without activation_checkpointing"
            )
        return
    blocks = set(unwrapped.blocks)
    if recomputed != blocks:
        yield f"the activations are recomputed of {_listed(recomputed)}; expected {_listed(blocks)}"


def _blocks_and_modules_inside(unwrapped: UnwrappedInfo) -> set[str]:
    """Return the names of blocks, and of all modules inside them that have parameters."""
    names = set(unwrapped.blocks)
    for info in unwrapped.parameters:
        module = module_of(info.name)
        while module:
            if _is_inside(module, unwrapped.blocks):
                names.add(module)
            module = module_of(module)
    return names


def _recomputed_operators(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a text if blocks recomputed too little in the backward pass, or too much.

    ``snapshot.recomputed`` counts operators in blocks: ``calls`` of blocks, ``products`` (matrix
    products) in the forward pass, ``products again`` and ``others again`` after it. It is empty if
    they could not be counted, as in a compiled graph.
    """
    # False, True, ``selective`` (keep the results of matrix products), ``reentrant``,
    # ``deepspeed``.
    mode = cell.option("activation_checkpointing")
    counts = snapshot.recomputed
    if not mode or not counts.get("products"):
        return
    again = counts.get("products again", 0)
    products = counts["products"]
    counted = f"blocks computed {again} of {products} matrix products again"
    if mode == "selective" and again:
        yield f"{counted}; expected none in selective activation checkpointing"
    elif not again and not counts.get("others again"):
        yield "blocks computed nothing again in the backward pass"
    # torch stops recomputing a block once it has what the backward pass needs. So the last product
    # of each block is not computed again.
    elif mode is True and not again and products > counts["calls"]:
        yield f"{counted}; expected all but the last of each block"


def _is_inside(name: str, modules: Collection[str]) -> bool:
    """Tell whether the module or parameter of that name is inside one of the modules."""
    for module in modules:
        if name.startswith(f"{module}."):
            return True
    return False


def _compiled_modules(cell: Cell, unwrapped: UnwrappedInfo, model: ModelInfo) -> Iterator[str]:
    """Yield texts unless torch.compile has compiled what the cell says.

    That is the whole model, each block (``regional``), or one block or a module inside it
    (``partial``).
    """
    # False, True and ``aot_eager`` (the whole model), ``regional``, ``partial``.
    mode = cell.option("compile")
    if not mode:
        return
    if not model.graphs:
        yield "torch.compile made no graph in three steps: the model runs uncompiled"
    blocks = set(unwrapped.blocks)
    compiled = _unwrapped_names(cell, unwrapped, model.compiled)
    if mode == "partial":
        inside_blocks = set()
        for name in compiled:
            if _is_inside(name, blocks):
                inside_blocks.add(name)
        if not inside_blocks and blocks.isdisjoint(compiled):
            yield f"what is compiled is {_listed(compiled)}; expected one of the blocks"
    elif mode == "regional":
        if not blocks <= compiled:
            yield f"what is compiled is {_listed(compiled)}; expected each of {_listed(blocks)}"
    elif mode in {True, "aot_eager"} and not model.compiled:
        yield "nothing is wrapped by torch.compile"


def _ignored_modules(cell: Cell, unwrapped: UnwrappedInfo, model: ModelInfo) -> Iterator[str]:
    """Yield a text for each parameter of ``ignored_modules`` that is sharded all the same."""
    strategy = STRATEGIES.get(cell.strategy)
    # ``kind`` says how ranks store live parameters: as ``DTensor``, ``FSDP1 shard``, ``ZeRO-3``, or
    # as ``Tensor`` under a strategy that shards none, such as DDP.
    if strategy.kind == "Tensor":
        return
    numel_by_name = {info.name: info.local_numel for info in unwrapped.parameters}
    for info in model.parameters:
        name = strategy.canonical(info.name, cell, numel_by_name)
        is_whole = info.local_numel == numel_by_name.get(name, 0)
        if info.kind != strategy.kind or is_whole:
            continue
        if _is_inside(name, unwrapped.ignored_modules):
            yield (
                f"{name!r} is sharded ({info.kind}, {info.layout}); "
                "it was to be left out of the sharding"
            )


def _quoted(module: str) -> str:
    """Return the words for one module: ``'layers.0'``, or ``the root`` for the empty name."""
    if not module:
        return "the root"
    return repr(module)


def _listed(names: Collection[str]) -> str:
    """Return the words for modules: ``'layers.0', the root``, at most six, and how many more."""
    if not names:
        return "nothing"
    quoted = [_quoted(name) for name in names]
    quoted.sort()
    listed = ", ".join(quoted[:6])
    more = len(quoted) - 6
    if more > 0:
        listed += f" and {more} more"
    return listed
