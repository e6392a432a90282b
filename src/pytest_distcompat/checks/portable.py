"""Check ``portable``: a checkpoint of one strategy loads under another strategy, bit by bit.

A driver declares which: ``portable = {"ddp": "fsdp2"}``.

``judge.judge`` calls the check once both runs have ended. It gets a cell, one point of the test
matrix such as ``ddp-fp32-w2``, and a trace with two runs (a run is one process group from start to
end): ``train`` saves after three steps, and ``port`` loads that checkpoint under the other strategy
and takes two steps. For each rank and action there is a snapshot with digests (hashes) of what the
rank holds of parameters and optimizer state. A digest of a whole tensor can be computed from those
of its shards. The check yields findings, such as ``parameter 'lm_head.weight': other values after
the load under fsdp2``.

Only DeepSpeed can load the optimizer state of its ZeRO strategies. From these only weights are
moved: ``train`` exports the model, and ``port`` loads it with the model's own library.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell does not have the check, or None;
``depends_on`` has the facets of a cell (precision, options, ...) on which the outcome depends, so
that of cells with equal facets the default profile tests only one; ``costly`` says that it needs
several runs of its own.
"""

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
    trained_again,
)
from pytest_distcompat.checks._elsewhere import saved_as_elsewhere
from pytest_distcompat.driver import Driver
from pytest_distcompat.model_values import (
    compare,
    differences,
    exported_weights,
    flat_parameters,
    precision_of_products,
    settings,
    step_counts,
    values,
)
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import SAVED, Scenario
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import RunTrace, Snapshot, Trace


def _why_not_portable(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the check does not apply to the cell; None if it does."""
    if cell.strategy not in driver.portable:
        return (
            f"the driver does not claim that another strategy loads a checkpoint of {cell.strategy}"
        )
    if cell.option("save_only_model"):
        return "checkpoints hold the model alone: there is no training to resume"
    if _moves_weights_only(cell):
        reason = _why_weights_cannot_move(cell, driver)
        if reason:
            return reason
    # Cells that save what a simpler cell saves too are not tested once more.
    return saved_as_elsewhere(cell) or _why_target_cannot_go_on(cell, driver)


def _moves_weights_only(cell: Cell) -> bool:
    """Tell whether the strategy is one of ZeRO, whose checkpoints only DeepSpeed can load."""
    return STRATEGIES.get(cell.strategy).flat_masters


def _why_weights_cannot_move(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why exported weights cannot be trained on under another strategy; None if they can."""
    if not driver.can("export") or not driver.can("reload"):
        return (
            "only weights can be moved from DeepSpeed's checkpoints, "
            "and the driver has no export() and reload()"
        )
    if cell.own_disks:
        return "the weights are exported on the node of rank 0 alone"
    if cell.option("lora"):
        return "PEFT loads an exported adapter frozen, so it cannot be trained on"
    return None


def _why_target_cannot_go_on(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the other strategy cannot run the cell; None if it can."""
    target = driver.portable[cell.strategy]
    port_run = _port_runs(cell, driver).runs[-1]
    # The cell in which ``port`` runs: the other strategy, without options that it may lack.
    target_cell = port_run.cell(cell)
    reason = STRATEGIES.get(target).unsupported_reason(target_cell)
    if not reason and driver.unsupported_reason(target_cell, "cpu"):
        # The device is not known here. The cell is left out only if neither device can run it.
        reason = driver.unsupported_reason(target_cell, "cuda")
    if reason:
        return f"{target} cannot go on from it: {reason}"
    return None


def _port_runs(cell: Cell, driver: type[Driver]) -> Scenario:
    """Return the runs ``train`` and ``port``; for ZeRO ``port`` loads the export."""
    target = driver.portable[cell.strategy]
    if _moves_weights_only(cell):
        return scenario.port_weights(target)
    return scenario.port(target)


#: The last snapshots that the check needs: (run, action, which one of that action, from 0).
_UNTIL_PORTED = (("train", "step", SAVED + 1), ("port", "step", 0))


@check(
    scenario=_port_runs,
    until=_UNTIL_PORTED,
    order=12,
    not_applicable=_why_not_portable,
    costly=True,
    depends_on=RESHARDED,
)
def portable(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a checkpoint loaded under another strategy is bit by bit what was saved.

    The world size is the same. In float32, or from flat parameters, the next two losses equal those
    of the uninterrupted run. ZeRO moves weights only: they equal the exported ones.

    If it fails: look for what is saved by position, rank or flat parameter instead of by name.
    State that several parameters share, such as the ``step`` of FSDP1's flat one, is incremented
    once for each.
    """
    train = trace.run("train")
    port = trace.run("port")
    if _moves_weights_only(cell):
        yield from _other_weights(train, port)
        return
    when = f"after the load under {Cell.parse(port.cell).strategy}"
    saved = train.at("save")
    loaded = port.at("load")
    # Findings for ranks without a snapshot.
    yield from every_rank(saved, train.world_size, "save")
    yield from every_rank(loaded, port.world_size, "the load")
    # ``train`` saves after ``SAVED`` steps. A load that took as many trained again instead.
    steps_before_save: list[Snapshot] = []
    for nth in range(SAVED):
        steps_before_save += train.at("step", nth)
    yield from trained_again(loaded, steps_before_save)
    if flat_parameters(saved):
        yield from _other_flat_step_counts(train, port, when)
    else:
        # Digests of whole parameters and of their optimizer state, by unwrapped name.
        saved_values = values(train, saved)
        loaded_values = values(port, loaded)
        yield from differences(saved_values, loaded_values, when)
        yield from step_counts(train, port, when)
    # Numbers of the scheduler and of param groups, such as the learning rate.
    yield from settings(saved, loaded, when)
    yield from _other_losses(cell, train, port, when)


def _other_flat_step_counts(train: RunTrace, port: RunTrace, when: str) -> Iterator[str]:
    """Yield a finding for wrong step counts in the optimizer state, one step after the load.

    FSDP1 without ``use_orig_params`` joins many parameters into a FlatParameter. It has one count
    for all of them, which each of them must get.
    """
    expected: set[str] = set()
    train_values = values(train, train.at("step", SAVED))
    for digests in train_values.of("step").values():
        expected.update(digests)
    wrong: dict[str, tuple[str, ...]] = {}
    port_values = values(port, port.at("step"))
    for name, digests in port_values.of("step").items():
        for digest in digests:
            if digest not in expected:
                wrong[name] = (digest,)
    if wrong:
        expected_by_name = dict.fromkeys(wrong, tuple(sorted(expected)))
        yield from compare("step", expected_by_name, wrong, f"one step {when}")


def _other_weights(train: RunTrace, port: RunTrace) -> Iterator[str]:
    """Yield findings for parameters that are not, once built, the exported ones."""
    built = port.at("build")
    when = "after the export and build"
    yield from every_rank(built, port.world_size, "build")
    # The digests that the exported file should have, by unwrapped name.
    exported = exported_weights(train, port)
    loaded = values(port, built)
    # Tensors whose parts on the ranks do not add up to the whole.
    for text in loaded.wrong:
        yield f"{text} {when}"
    yield from compare("parameter", exported, loaded.of("parameter"), when)
    yield from finite_losses(port.at("step"), "the first step")


def _other_losses(cell: Cell, train: RunTrace, port: RunTrace, when: str) -> Iterator[str]:
    """Yield findings for losses of the two steps after the load that differ too much.

    Each of the two runs may be off by the tolerance of its precision, so twice that is allowed. Two
    infinite losses are equal, and are findings too.
    """
    compares = _losses_are_comparable(cell, train, port)
    tolerance = 2 * precision_of_products(cell, train).loss_tolerance
    for nth in range(2):
        name = f"{nth + 1} {when}"
        expected_losses: dict[int, float | None] = {}
        for snapshot in train.at("step", SAVED + nth):
            expected_losses[snapshot.rank] = snapshot.loss
        for snapshot in port.at("step", nth):
            expected = expected_losses.get(snapshot.rank)
            if compares and (snapshot.loss is None or expected is None):
                yield f"rank {snapshot.rank}: no loss to compare; expected step() to return it"
                continue
            infinite = list(finite_losses([snapshot], f"step {name}"))
            yield from infinite
            if infinite or not compares:
                continue
            for text in _other_loss(snapshot.loss, expected, tolerance):
                yield f"rank {snapshot.rank}: loss {name} is {text}"


def _other_loss(loss: float | None, expected: float | None, tolerance: float) -> Iterator[str]:
    """Yield the words for a loss that differs by more than the tolerance, relatively."""
    # A missing loss has a finding of its own.
    if loss is None or expected is None:
        return
    if not math.isclose(loss, expected, rel_tol=tolerance):
        expectation = f"{expected:.6g} in the run that never stopped"
        yield f"{loss:.6g}; {expectation} ({tolerance:.0e} allowed)"


def _losses_are_comparable(cell: Cell, train: RunTrace, port: RunTrace) -> bool:
    """Tell whether each rank must have the losses of the run ``train`` after the load."""
    # Ranks that shared a batch, as under tensor parallelism, have batches of their own now.
    if Cell.parse(port.cell).dp_size != cell.dp_size:
        return False
    if PRECISIONS.get(cell.precision).compute == "float32":
        return True
    # In lower precision each strategy rounds in other places. Losses are compared only if there is
    # nothing else to compare: values of flat parameters have no names.
    return flat_parameters(train.at("save"))
