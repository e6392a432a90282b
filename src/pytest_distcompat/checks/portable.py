"""Does a checkpoint of one strategy load under another?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_distcompat import scenario
from pytest_distcompat.cell import Cell
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
    settings,
    step_counts,
    values,
)
from pytest_distcompat.driver import Driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import SAVED, Scenario
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import RunTrace, Trace


def _not_portable(cell: Cell, driver: type[Driver]) -> str | None:
    target = driver.portable.get(cell.strategy)
    if target is None:
        return f"the driver does not claim that another strategy loads a checkpoint of {cell.strategy}"
    if cell.option("save_only_model"):
        return "checkpoints hold the model alone: there is no training to resume"
    if _by_weights(cell) and not (driver.can("export") and driver.can("reload")):
        return "only weights can be moved from DeepSpeed's checkpoints, and the driver has no export() and reload()"
    if _by_weights(cell) and cell.option("lora"):
        return "PEFT loads an exported adapter frozen, so it cannot be trained on"
    if elsewhere := saved_as_elsewhere(cell):
        return elsewhere
    there = _runs(cell, driver).runs[-1].cell(cell)
    # The device is not known here, so only what both devices cannot do is left out.
    problem = STRATEGIES.get(target).unsupported_reason(there) or (
        driver.unsupported_reason(there, "cpu") and driver.unsupported_reason(there, "cuda")
    )
    return f"{target} cannot go on from it: {problem}" if problem else None


def _by_weights(cell: Cell) -> bool:
    """Tell whether only exported weights can be moved: DeepSpeed alone can load its optimizer states."""
    return STRATEGIES.get(cell.strategy).flat_masters


def _runs(cell: Cell, driver: type[Driver]) -> Scenario:
    target = driver.portable[cell.strategy]
    return scenario.port_weights(target) if _by_weights(cell) else scenario.port(target)


_UNTIL = (("train", "step", SAVED + 1), ("port", "step", 0))


@check(scenario=_runs, until=_UNTIL, order=12, not_applicable=_not_portable, costly=True, depends_on=RESHARDED)
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
    if rounds or Cell.parse(port.cell).dp_size != cell.dp_size:
        for nth in range(2):
            yield from finite_losses(port.at("step", nth), f"step {nth + 1} {when}")
        return
    tolerance = 2 * precision.loss_tolerance
    for nth in range(2):
        whole = {snapshot.rank: snapshot.loss for snapshot in train.at("step", SAVED + nth)}
        for snapshot in port.at("step", nth):
            expected = whole.get(snapshot.rank)
            if snapshot.loss is None or expected is None:
                yield f"rank {snapshot.rank}: no loss to compare; expected step() to return it"
            elif not math.isfinite(snapshot.loss):
                yield from finite_losses([snapshot], f"step {nth + 1} {when}")
            elif not math.isclose(snapshot.loss, expected, rel_tol=tolerance):
                finding = f"loss {nth + 1} {when} is {snapshot.loss:.6g}; {expected:.6g} in the run that never stopped"
                yield f"rank {snapshot.rank}: {finding} ({tolerance:.0e} allowed)"
