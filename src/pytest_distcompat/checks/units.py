"""Is the model sharded, recomputed and compiled block by block as the cell says?"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, requested
from pytest_distcompat.checks._values import by_stage
from pytest_distcompat.driver import Driver
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ModelInfo, Snapshot, Trace, UnwrappedInfo

#: The values of ``ModelInfo.wrappers`` that shard a model in units.
_WITH_UNITS = frozenset({"FSDP1", "FSDP2"})


def _no_units(cell: Cell, driver: type[Driver]) -> str | None:
    if STRATEGIES.get(cell.strategy).wrapper in _WITH_UNITS:
        return None
    if cell.option("activation_checkpointing") or cell.option("compile"):
        return None
    return f"{cell.strategy} cuts no units, and nothing is recomputed or compiled"


@check(scenario=TRAIN, until=(("train", "step", 2),), order=7, not_applicable=_no_units)
def units(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that FSDP's units, activation checkpointing and torch.compile apply to the model's blocks.

    Each block and the root is a unit; no child of a block is. Whole blocks are recomputed; selectively all but their
    matrix products. The driver or the model declares the blocks, as models of transformers do; unknown blocks are a finding.

    If it fails: compare the policy's class names with the model's. One unit for all gathers the whole model at once,
    one for each child costs a collective each.
    """
    run, unwrapped = trace.run(), trace.run().unwrapped
    if unwrapped is None:
        yield "the unwrapped model was not recorded"
        return
    if unknown := _unknown(cell, unwrapped):
        yield unknown
        return
    trained = run.trained
    yield from every_rank(trained, cell.world_size, "three steps")
    for here, part in by_stage(run, trained):
        for snapshot in here:
            if snapshot.model is None or part is None:
                yield f"rank {snapshot.rank}: no model to read units from"
                continue
            for judge in (_cut, _recomputed, _compiled, _left_out):
                yield from (f"rank {snapshot.rank}: {text}" for text in judge(cell, part, snapshot.model))
            yield from (f"rank {snapshot.rank}: {text}" for text in _computed_again(cell, snapshot))


def _unknown(cell: Cell, unwrapped: UnwrappedInfo) -> str | None:
    """Return a finding if the expected units are not known, so that the check cannot pass; None otherwise."""
    if cell.option("ignored_modules") and not unwrapped.ignored_modules:
        return "it is not known which module was to be left out of the sharding"
    sharded = STRATEGIES.get(cell.strategy).wrapper in _WITH_UNITS and cell.option("wrap_policy") != "size"
    compiled = cell.option("compile") in {"regional", "partial"}
    if not (sharded or compiled or cell.option("activation_checkpointing")):
        return None
    classes = " or ".join(map(repr, unwrapped.block_classes))
    if "" in unwrapped.blocks:
        return f"the whole model that was seen is one block, a {classes}: nothing wraps what is around it"
    if unwrapped.blocks:
        return None
    reason = f"no module of it is a {classes}" if classes else "it declares none (_no_split_modules)"
    hint = "name their classes by blocks= of launch, or blocks of the driver"
    return f"the model's blocks are not known: {reason}; {hint}"


def _names(cell: Cell, unwrapped: UnwrappedInfo, live: Collection[str]) -> set[str]:
    """Return the unwrapped model's names of live modules; the root's is empty, whatever wraps it."""
    strategy = STRATEGIES.get(cell.strategy)
    known = {info.name.rpartition(".")[0] for info in unwrapped.parameters} | set(unwrapped.blocks)
    return {strategy.canonical(name, cell, known) for name in live}


def _cut(cell: Cell, unwrapped: UnwrappedInfo, model: ModelInfo) -> Iterator[str]:
    if STRATEGIES.get(cell.strategy).wrapper not in _WITH_UNITS:
        return
    found = _names(cell, unwrapped, model.units)
    if cell.only_tp and not found:
        return
    if cell.option("wrap_policy") == "size":
        if len(found) < 2:
            yield "FSDP has one unit for the whole model; expected one for each part that is large enough"
        return
    # A model may declare a module inside a block to be a block too.
    inside = {name for name in found if _under(name, unwrapped.blocks)} - set(unwrapped.blocks) - _adapted(unwrapped)
    # Of several stages on a rank each is a root, and none of them the model's.
    wanted = {*unwrapped.blocks, *([""] if cell.stages == cell.pp else [])}
    # Embeddings and heads may be units of their own.
    if inside or not wanted <= found:
        expected = _list(wanted)
        yield f"FSDP's units are {_list(found)}; expected {expected}, and none inside a block"


def _adapted(unwrapped: UnwrappedInfo) -> set[str]:
    """Return the trained layers of blocks that are frozen otherwise."""
    # PEFT's policy for FSDP1 makes a unit of each, apart from the frozen ones: https://huggingface.co/docs/peft/accelerate/fsdp.
    owners: set[str] = set()
    for block in unwrapped.blocks:
        held = [info for info in unwrapped.parameters if info.name.startswith(f"{block}.")]
        if not all(info.trainable for info in held):
            owners |= {info.name.rpartition(".")[0] for info in held if info.trainable}
    return owners


def _recomputed(cell: Cell, unwrapped: UnwrappedInfo, model: ModelInfo) -> Iterator[str]:
    found = _names(cell, unwrapped, model.checkpointed) & _inside(unwrapped)
    if not cell.option("activation_checkpointing"):
        # A script may turn it on by itself; a driver that supports the option was given the cell's value.
        if found and requested(cell, unwrapped, "activation_checkpointing"):
            yield f"the activations of {_list(found)} are recomputed without activation_checkpointing"
        return
    if found != (expected := set(unwrapped.blocks)):
        yield f"the activations are recomputed of {_list(found)}; expected {_list(expected)}"


def _computed_again(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield findings for what blocks did not compute again, or did although it was to be kept; nothing if that was not seen."""
    mode, seen = cell.option("activation_checkpointing"), snapshot.recomputed
    if not mode or not seen.get("products"):
        return
    again = seen.get("products again", 0)
    counted = f"blocks computed {again} of {seen['products']} matrix products again"
    if mode == "selective" and again:
        yield f"{counted}; expected none in selective activation checkpointing"
    elif not again and not seen.get("others again"):
        yield "blocks computed nothing again in the backward pass"
    # A recomputation ends with what it needs, so that the last product of a block is not computed again.
    elif mode is True and not again and seen["products"] > seen["calls"]:
        yield f"{counted}; expected all but the last of each block"


def _inside(unwrapped: UnwrappedInfo) -> set[str]:
    """Return the blocks and all modules inside them; a parent of blocks may be marked without being recomputed."""
    owners = {info.name.rpartition(".")[0] for info in unwrapped.parameters}
    parts = {".".join(owner.split(".")[:n]) for owner in owners for n in range(1, owner.count(".") + 2)}
    return set(unwrapped.blocks) | {part for part in parts if _under(part, unwrapped.blocks)}


def _under(name: str, blocks: Collection[str]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def _compiled(cell: Cell, unwrapped: UnwrappedInfo, model: ModelInfo) -> Iterator[str]:
    mode = cell.option("compile")
    if not mode:
        return
    if not model.graphs:
        yield "torch.compile made no graph in three steps: the model runs uncompiled"
    found = _names(cell, unwrapped, model.compiled)
    if mode == "partial" and not any(_under(name, unwrapped.blocks) or name in unwrapped.blocks for name in found):
        yield f"what is compiled is {_list(found)}; expected one of the blocks"
    elif mode == "regional" and not set(unwrapped.blocks) <= found:
        yield f"what is compiled is {_list(found)}; expected each of {_list(set(unwrapped.blocks))}"
    elif mode in {True, "aot_eager"} and not model.compiled:
        yield "nothing is wrapped by torch.compile"


def _left_out(cell: Cell, unwrapped: UnwrappedInfo, model: ModelInfo) -> Iterator[str]:
    strategy = STRATEGIES.get(cell.strategy)
    names = {info.name: info.local_numel for info in unwrapped.parameters}
    for info in model.parameters:
        name = strategy.canonical(info.name, cell, names)
        cut = info.kind == strategy.kind != "Tensor" and info.local_numel != names.get(name, 0)
        if cut and _under(name, unwrapped.ignored_modules):
            yield f"{name!r} is sharded ({info.kind}, {info.layout}); it was to be left out of the sharding"


def _list(names: Collection[str]) -> str:
    quoted = sorted(repr(name) if name else "the root" for name in names)
    return ", ".join(quoted[:6]) + (f" and {len(quoted) - 6} more" if len(quoted) > 6 else "") if quoted else "nothing"
