"""Does a checkpoint of one world size, or of one strategy, load at another?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_distcompat import scenario
from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.checks._base import (
    RESHARDED,
    check,
    every_rank,
    finite_losses,
    saved_as_elsewhere,
    trained_again,
)
from pytest_distcompat.checks._values import (
    compare,
    differences,
    exported_weights,
    flat_parameters,
    precision_of_products,
    settings,
    step_counts,
    values,
)
from pytest_distcompat.driver import Driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import SAVED, Scenario
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import RunTrace, Trace


def _not_by_name(cell: Cell) -> str | None:
    """Return why shards of two world sizes cannot be compared by name; None if they can."""
    if cell.option("save_only_model"):
        return "checkpoints hold the model alone: there is no training to resume"
    flat = "FSDP1 keeps flat parameters: they have no names by which the shards of two world sizes could be compared"
    return None if cell.option("use_orig_params") else flat


def _not_resharded(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the check does not apply to the cell; None if it does."""
    if cell.strategy not in driver.reshards:
        return f"the driver does not claim that {cell.strategy} loads a checkpoint of another world size"
    if cell.per_node and STRATEGIES.get(cell.strategy).flat_masters:
        return "each node has the shards of its own ranks, and other ranks would need those of all"
    return _not_by_name(cell) or saved_as_elsewhere(cell)


def _runs(cell: Cell, driver: type[Driver]) -> Scenario:
    """Return the runs ``train``, ``up``, ``back`` and ``one``, whose world sizes and meshes depend on the cell's."""
    if cell.tp == 1:
        return scenario.reshard(cell)
    # Back into as many parts as the driver can cut.
    rest, sizes = cell.without("tp").options, (int(size) for size in OPTIONS["tp"].values)
    cells = [
        Cell(cell.strategy, cell.precision, cell.world_size, (*rest, ("tp", tp)), cell.nodes)
        for tp in sizes
        if cell.world_size // cell.cp // cell.pp % (tp * cell.ep) == 0
    ]
    return scenario.reshard(cell, max(one.tp for one in cells if one == cell or not driver.unsupported_reason(one)))


_UNTIL = (("train", "step", SAVED), ("up", "save", 0), ("up", "step", 1), ("back", "step", 0), ("one", "step", 0))


@check(scenario=_runs, until=_UNTIL, order=11, not_applicable=_not_resharded, costly=True, depends_on=RESHARDED)
def reshard(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a checkpoint loaded at another world size, or on another mesh, is bit by bit what was saved.

    The checkpoint is loaded at twice the world size, back at the first, and in one process. A tensor-parallel one is
    instead loaded without tensor parallelism, and back into the most parts; that of a pipeline by ranks with the whole
    model, and back into its stages. One more step has a finite loss.

    If it fails: what is saved by rank or padded fits no other number of ranks. Save with ``get_state_dict`` and
    torch.distributed.checkpoint (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html), or convert first,
    as DeepSpeed does (https://www.deepspeed.ai/tutorials/universal-checkpointing/).
    """
    for name, source in (("up", "train"), ("back", "up"), ("one", "train")):
        if name in trace.runs:
            yield from _changes(trace.run(source), trace.run(name))


def _changes(source: RunTrace, run: RunTrace) -> Iterator[str]:
    """Yield findings for everything that one run did not load as the other saved it."""
    ranks, cell = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks", Cell.parse(run.cell)
    ranks += "".join(f" with {name} {size}" for name, size in (("tp", cell.tp), ("pp", cell.pp)) if size > 1)
    when = f"after the load at {ranks}"
    saved, loaded = source.at("save"), run.at("load")
    yield from every_rank(saved, source.world_size, "save")
    yield from every_rank(loaded, run.world_size, f"the load at {ranks}")
    yield from differences(values(source, saved), values(run, loaded), when)
    yield from settings(saved, loaded, when)
    yield from step_counts(source, run, when)
    yield from finite_losses(run.at("step"), f"the first step {when}")


def _not_portable(cell: Cell, driver: type[Driver]) -> str | None:
    target = driver.portable.get(cell.strategy)
    if target is None:
        return f"the driver does not claim that another strategy loads a checkpoint of {cell.strategy}"
    if cell.option("save_only_model"):
        return "checkpoints hold the model alone: there is no training to resume"
    if _by_weights(cell) and not (driver.can("export") and driver.can("reload")):
        return "only weights can be moved from DeepSpeed's checkpoints, and the driver has no export() and reload()"
    if _by_weights(cell) and cell.per_node:
        return "the weights are exported on the node of rank 0 alone"
    if _by_weights(cell) and cell.option("lora"):
        return "PEFT loads an exported adapter frozen, so it cannot be trained on"
    if elsewhere := saved_as_elsewhere(cell):
        return elsewhere
    there = _port_runs(cell, driver).runs[-1].cell(cell)
    # The device is not known here, so only what both devices cannot do is left out.
    problem = STRATEGIES.get(target).unsupported_reason(there) or (
        driver.unsupported_reason(there, "cpu") and driver.unsupported_reason(there, "cuda")
    )
    return f"{target} cannot go on from it: {problem}" if problem else None


def _by_weights(cell: Cell) -> bool:
    """Tell whether only exported weights can be moved: DeepSpeed alone can load its optimizer states."""
    return STRATEGIES.get(cell.strategy).flat_masters


def _port_runs(cell: Cell, driver: type[Driver]) -> Scenario:
    target = driver.portable[cell.strategy]
    return scenario.port_weights(target) if _by_weights(cell) else scenario.port(target)


_PORT_UNTIL = (("train", "step", SAVED + 1), ("port", "step", 0))


@check(
    scenario=_port_runs, until=_PORT_UNTIL, order=12, not_applicable=_not_portable, costly=True, depends_on=RESHARDED
)
def portable(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a checkpoint loaded under another strategy at the same world size is bit by bit what was saved.

    In float32, or from flat parameters, the next two losses equal those of the uninterrupted run. ZeRO moves weights
    only: they equal the exported ones.

    If it fails: look for what is saved by position, rank or flat parameter instead of by name. State that several
    parameters share, such as the ``step`` of FSDP1's flat one, is incremented once for each.
    """
    train, port = trace.run("train"), trace.run("port")
    when = f"after the load under {Cell.parse(port.cell).strategy}"
    if _by_weights(cell):
        yield from _weights(train, port)
        return
    saved, loaded = train.at("save"), port.at("load")
    yield from every_rank(saved, train.world_size, "save")
    yield from every_rank(loaded, port.world_size, "the load")
    yield from trained_again(loaded, (snapshot for nth in range(SAVED) for snapshot in train.at("step", nth)))
    if flat_parameters(saved):
        yield from _counts(train, port, when)
    else:
        yield from differences(values(train, saved), values(port, loaded), when)
        yield from step_counts(train, port, when)
    yield from settings(saved, loaded, when)
    yield from _losses(cell, train, port, when)


def _counts(train: RunTrace, port: RunTrace, when: str) -> Iterator[str]:
    """Yield a finding for wrong step counts of flat parameters: they have no names to compare by, but one count."""
    expected = {digest for found in values(train, train.at("step", SAVED)).of("step").values() for digest in found}
    found = values(port, port.at("step")).of("step")
    wrong = {name: (digest,) for name, held in found.items() for digest in held if digest not in expected}
    if wrong:
        yield from compare("step", dict.fromkeys(wrong, tuple(sorted(expected))), wrong, f"one step {when}")


def _weights(train: RunTrace, port: RunTrace) -> Iterator[str]:
    built = port.at("build")
    yield from every_rank(built, port.world_size, "build")
    expected = exported_weights(train, port)
    found = values(port, built)
    yield from (f"{text} after the export and build" for text in found.wrong)
    yield from compare("parameter", expected, found.of("parameter"), "after the export and build")
    yield from finite_losses(port.at("step"), "the first step")


def _losses(cell: Cell, train: RunTrace, port: RunTrace, when: str) -> Iterator[str]:
    """Yield findings for losses that differ by more than twice the tolerance: each is within it of one reference."""
    # In lower precision, where each strategy rounds in other places, only those of flat parameters are compared, which
    # have no names.
    precision = PRECISIONS.get(cell.precision)
    rounds = precision.compute != "float32" and not flat_parameters(train.at("save"))
    # Ranks that were peers of tensor parallelism are fed other batches now.
    compares = not rounds and Cell.parse(port.cell).dp_size == cell.dp_size
    tolerance = 2 * precision_of_products(cell, train).loss_tolerance
    for nth in range(2):
        whole = {snapshot.rank: snapshot.loss for snapshot in train.at("step", SAVED + nth)}
        for snapshot in port.at("step", nth):
            expected = whole.get(snapshot.rank)
            if compares and (snapshot.loss is None or expected is None):
                yield f"rank {snapshot.rank}: no loss to compare; expected step() to return it"
            elif infinite := [*finite_losses([snapshot], f"step {nth + 1} {when}")]:
                yield from infinite
            elif compares and not math.isclose(snapshot.loss or 0.0, expected or 0.0, rel_tol=tolerance):
                finding = f"loss {nth + 1} {when} is {snapshot.loss:.6g}; {expected:.6g} in the run that never stopped"
                yield f"rank {snapshot.rank}: {finding} ({tolerance:.0e} allowed)"
