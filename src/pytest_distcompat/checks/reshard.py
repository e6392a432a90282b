"""Does a checkpoint of one world size, or of one strategy, load at another?"""

from __future__ import annotations

import dataclasses
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


def _why_not_comparable_by_name(cell: Cell) -> str | None:
    """Return why shards of two world sizes cannot be compared by name; None if they can."""
    if cell.option("save_only_model"):
        return "checkpoints hold the model alone: there is no training to resume"
    if not cell.option("use_orig_params"):
        return (
            "FSDP1 keeps flat parameters: "
            "they have no names by which the shards of two world sizes could be compared"
        )
    return None


def _why_not_resharded(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the check does not apply to the cell; None if it does."""
    if cell.strategy not in driver.reshards:
        return (
            f"the driver does not claim that {cell.strategy} loads a checkpoint of another world "
            "size"
        )
    if cell.own_disks and STRATEGIES.get(cell.strategy).flat_masters:
        return "each node has the shards of its own ranks, and other ranks would need those of all"
    return _why_not_comparable_by_name(cell) or saved_as_elsewhere(cell)


def _reshard_runs(cell: Cell, driver: type[Driver]) -> Scenario:
    """Return the runs ``train``, ``up``, ``back`` and ``one``.

    Their world sizes and meshes depend on the cell's.
    """
    if cell.tp == 1:
        return scenario.reshard(cell)
    # Back into as many parts as the driver can cut.
    largest = 1
    for value in OPTIONS["tp"].values:
        tp = int(value)
        ranks = cell.world_size // cell.cp // cell.pp
        if ranks % (tp * cell.ep):
            continue
        options = (*cell.without("tp").options, ("tp", tp))
        cell_of_size = dataclasses.replace(cell, options=options)
        if cell_of_size == cell or not driver.unsupported_reason(cell_of_size):
            largest = max(largest, cell_of_size.tp)
    return scenario.reshard(cell, largest)


_UNTIL_RESHARDED = (
    ("train", "step", SAVED),
    ("up", "save", 0),
    ("up", "step", 1),
    ("back", "step", 0),
    ("one", "step", 0),
)


@check(
    scenario=_reshard_runs,
    until=_UNTIL_RESHARDED,
    order=11,
    not_applicable=_why_not_resharded,
    costly=True,
    depends_on=RESHARDED,
)
def reshard(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a checkpoint loaded at another world size or mesh is bit by bit what was saved.

    The checkpoint is loaded at twice the world size, back at the first, and in one process. A
    tensor-parallel one is instead loaded without tensor parallelism, and back into the most parts;
    that of a pipeline by ranks with the whole model, and back into its stages. One more step has a
    finite loss.

    If it fails: what is saved by rank or padded fits no other number of ranks. Save with
    ``get_state_dict`` and torch.distributed.checkpoint
    (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html), or convert first, as
    DeepSpeed does (https://www.deepspeed.ai/tutorials/universal-checkpointing/).
    """
    saving_run = {"up": "train", "back": "up", "one": "train"}
    for loading, saving in saving_run.items():
        # A cell of one rank has no run ``one``.
        if loading in trace.runs:
            yield from _not_loaded_as_saved(trace.run(saving), trace.run(loading))


def _not_loaded_as_saved(saving: RunTrace, loading: RunTrace) -> Iterator[str]:
    """Yield findings for everything that one run did not load as the other saved it."""
    ranks = _described_mesh(loading)
    when = f"after the load at {ranks}"
    saved = saving.at("save")
    loaded = loading.at("load")
    yield from every_rank(saved, saving.world_size, "save")
    yield from every_rank(loaded, loading.world_size, f"the load at {ranks}")
    saved_values = values(saving, saved)
    loaded_values = values(loading, loaded)
    yield from differences(saved_values, loaded_values, when)
    yield from settings(saved, loaded, when)
    yield from step_counts(saving, loading, when)
    yield from finite_losses(loading.at("step"), f"the first step {when}")


def _described_mesh(run: RunTrace) -> str:
    """Return the words for a run's ranks in a finding, as "4 ranks with tp 2"."""
    cell = Cell.parse(run.cell)
    words = f"{run.world_size} ranks"
    if run.world_size == 1:
        words = "1 rank"
    if cell.tp > 1:
        words += f" with tp {cell.tp}"
    if cell.pp > 1:
        words += f" with pp {cell.pp}"
    return words


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
    return saved_as_elsewhere(cell) or _why_target_cannot_go_on(cell, driver)


def _moves_weights_only(cell: Cell) -> bool:
    """Tell whether only exported weights can be moved.

    DeepSpeed alone can load its optimizer states.
    """
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
    target_cell = port_run.cell(cell)
    reason = STRATEGIES.get(target).unsupported_reason(target_cell)
    if not reason and driver.unsupported_reason(target_cell, "cpu"):
        # The device is not known here, so only what both devices cannot do is left out.
        reason = driver.unsupported_reason(target_cell, "cuda")
    if reason:
        return f"{target} cannot go on from it: {reason}"
    return None


def _port_runs(cell: Cell, driver: type[Driver]) -> Scenario:
    """Return the runs ``train`` and ``port``."""
    target = driver.portable[cell.strategy]
    if _moves_weights_only(cell):
        return scenario.port_weights(target)
    return scenario.port(target)


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
    yield from every_rank(saved, train.world_size, "save")
    yield from every_rank(loaded, port.world_size, "the load")
    steps_before_save: list[Snapshot] = []
    for nth in range(SAVED):
        steps_before_save += train.at("step", nth)
    yield from trained_again(loaded, steps_before_save)
    if flat_parameters(saved):
        yield from _other_flat_step_counts(train, port, when)
    else:
        saved_values = values(train, saved)
        loaded_values = values(port, loaded)
        yield from differences(saved_values, loaded_values, when)
        yield from step_counts(train, port, when)
    yield from settings(saved, loaded, when)
    yield from _other_losses(cell, train, port, when)


def _other_flat_step_counts(train: RunTrace, port: RunTrace, when: str) -> Iterator[str]:
    """Yield a finding for wrong step counts of flat parameters.

    These have no names to compare by, but one count.
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
    exported = exported_weights(train, port)
    loaded = values(port, built)
    for text in loaded.wrong:
        yield f"{text} {when}"
    yield from compare("parameter", exported, loaded.of("parameter"), when)
    yield from finite_losses(port.at("step"), "the first step")


def _other_losses(cell: Cell, train: RunTrace, port: RunTrace, when: str) -> Iterator[str]:
    """Yield findings for losses that differ by more than twice the tolerance.

    Each loss is within the tolerance of one reference.
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
    """Yield the words for a loss that differs by more than the tolerance."""
    # A missing loss has a finding of its own.
    if loss is None or expected is None:
        return
    if not math.isclose(loss, expected, rel_tol=tolerance):
        expectation = f"{expected:.6g} in the run that never stopped"
        yield f"{loss:.6g}; {expectation} ({tolerance:.0e} allowed)"


def _losses_are_comparable(cell: Cell, train: RunTrace, port: RunTrace) -> bool:
    """Tell whether the other strategy should have each rank's losses of the uninterrupted run."""
    # Ranks that were peers of tensor parallelism are given other batches now.
    if Cell.parse(port.cell).dp_size != cell.dp_size:
        return False
    if PRECISIONS.get(cell.precision).compute == "float32":
        return True
    # In lower precision each strategy rounds in other places. Of flat parameters, which have no
    # names to compare values by, losses are compared nevertheless.
    return flat_parameters(train.at("save"))
