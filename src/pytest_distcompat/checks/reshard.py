"""Check ``reshard``: a checkpoint loads at another world size or mesh, bit by bit.

``judge.judge`` calls the check once all its runs have ended. It gets a cell, one point of the test
matrix such as ``fsdp2-fp32-w2`` (strategy, precision, 2 ranks), and a trace. A run is one process
group from start to end. For each rank and action the trace has a snapshot with digests (hashes) of
what the rank holds of parameters and optimizer state. The runs are

- ``train``, which saves after three steps on the cell's ranks, and trains on;
- ``up``, which loads that checkpoint on twice as many ranks, takes a step, saves, and trains on;
- ``back``, which loads what ``up`` saved, on the cell's ranks, and takes a step;
- ``one``, which loads the checkpoint of ``train`` in one process, and takes a step.

The step after a load is compared by its step counts with the step that the saving run took next.

A digest of a whole tensor can be computed from those of its shards, however they are cut. So no
tensor is gathered to compare runs. The check yields findings, such as ``parameter 'lm_head.weight':
other values after the load at 4 ranks``.

A cell with tensor parallelism (``tp``: ranks hold parts of each layer) or a pipeline (``pp``: ranks
hold some of the layers) is loaded in ``up`` without it, on as many ranks.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell does not have the check, or None;
``depends_on`` has the facets of a cell (precision, options, ...) on which the outcome depends, so
that of cells with equal facets the default profile tests only one; ``costly`` says that it needs
several runs of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pytest_distcompat import scenario
from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.checks._base import RESHARDED, check, every_rank, finite_losses
from pytest_distcompat.checks._elsewhere import saved_as_elsewhere
from pytest_distcompat.driver import Driver
from pytest_distcompat.model_values import differences, settings, step_counts, values
from pytest_distcompat.scenario import SAVED, Scenario
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import RunTrace, Trace


def _why_not_comparable_by_name(cell: Cell) -> str | None:
    """Return why two checkpoints cannot be compared tensor by tensor; None if they can."""
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
    # Each machine has a directory of its own for checkpoints, and under ZeRO each rank writes its
    # own shard of the masters, the float32 weights that the optimizer updates.
    if cell.own_disks and STRATEGIES.get(cell.strategy).flat_masters:
        return "each node has the shards of its own ranks, and other ranks would need those of all"
    return _why_not_comparable_by_name(cell) or saved_as_elsewhere(cell)


def _reshard_runs(cell: Cell, driver: type[Driver]) -> Scenario:
    """Return the runs ``train``, ``up``, ``back`` and ``one``.

    Their world sizes and meshes depend on the cell's.
    """
    if cell.tp == 1:
        return scenario.reshard(cell)
    # ``back`` cuts the layers into the most parts that the driver can cut them into on these ranks,
    # so into other parts than ``train`` if it can.
    largest = 1
    for value in OPTIONS["tp"].values:
        tp = int(value)
        # The ranks that context parallelism and the pipeline leave.
        ranks = cell.world_size // cell.cp // cell.pp
        if ranks % (tp * cell.ep):
            continue
        options = (*cell.without("tp").options, ("tp", tp))
        cell_of_size = dataclasses.replace(cell, options=options)
        if cell_of_size == cell or not driver.unsupported_reason(cell_of_size):
            largest = max(largest, cell_of_size.tp)
    return scenario.reshard(cell, largest)


#: The last snapshots that the check needs: (run, action, which one of that action, from 0). Those
#: of ``train`` and of ``up`` are of the step after the save.
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
    # The run that loads -> the run that saved.
    saving_run = {"up": "train", "back": "up", "one": "train"}
    for loading, saving in saving_run.items():
        # A cell of one rank has no run ``one``.
        if loading in trace.runs:
            yield from _not_loaded_as_saved(trace.run(saving), trace.run(loading))


def _not_loaded_as_saved(saving: RunTrace, loading: RunTrace) -> Iterator[str]:
    """Yield findings for everything that ``loading`` has otherwise than ``saving`` saved it.

    They are parameters, buffers, optimizer state, learning rates, and step counts after one step.
    """
    ranks = _described_mesh(loading)
    when = f"after the load at {ranks}"
    saved = saving.at("save")
    loaded = loading.at("load")
    yield from every_rank(saved, saving.world_size, "save")
    yield from every_rank(loaded, loading.world_size, f"the load at {ranks}")
    # Digests of whole tensors, put together from those of all ranks' shards.
    saved_values = values(saving, saved)
    loaded_values = values(loading, loaded)
    yield from differences(saved_values, loaded_values, when)
    yield from settings(saved, loaded, when)
    yield from step_counts(saving, loading, when)
    yield from finite_losses(loading.at("step"), f"the first step {when}")


def _described_mesh(run: RunTrace) -> str:
    """Return the words for a run's ranks in a finding: ``4 ranks with tp 2``."""
    cell = Cell.parse(run.cell)
    words = f"{run.world_size} ranks"
    if run.world_size == 1:
        words = "1 rank"
    if cell.tp > 1:
        words += f" with tp {cell.tp}"
    if cell.pp > 1:
        words += f" with pp {cell.pp}"
    return words
