"""Check ``restarts``: a resumed run can be saved and resumed again, and goes on in the next epoch.

The check ``resume`` loads one checkpoint and takes two steps. Counters that begin at 0 in a resumed
run show only later: in its own checkpoint, or at the next end of an epoch.

``judge.judge`` calls the check once all its runs have ended. It gets a cell, one point of the test
matrix such as ``fsdp2-fp32-w2-grad_accum_2``, and a trace of these runs (a run is one process group
from start to end):

- ``train`` saves after 3 steps and goes on without a stop; it is what the others must equal.
- ``second`` loads that checkpoint, saves after 1 step and again after 3, and takes 5 steps.
- ``third`` loads the later save of ``second`` and takes 4 steps.
- ``first_save`` loads the earlier save; only if the trainer keeps both.

For each rank and action there is a snapshot: losses, learning rates, and digests (hashes) of what
the rank holds. The check yields findings, such as ``rank 0: loss 2 after the second load is 0.61;
0.58 in the run that never stopped``.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell of a driver (the class by which a trainer is
tested) does not have the check, or None; ``depends_on`` has the facets of a cell (precision,
options, ...) on which the outcome depends, so that of cells with equal facets the default profile
tests only one; ``costly`` says that it needs several runs of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.checks._elsewhere import options_beside_checkpoints
from pytest_distcompat.checks._repeated_steps import first_other_step
from pytest_distcompat.driver import Driver
from pytest_distcompat.model_values import differences, settings, values
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import RESTARTS, RESTARTS_OF_BOTH, SAVED, Scenario
from pytest_distcompat.trace import RunTrace, Trace

#: The steps of the run ``second``, those of them before its later save, and the steps of ``third``.
SECOND_STEPS, SECOND_SAVED, THIRD_STEPS = 5, 3, 4
#: The steps of the run ``first_save``. Its checkpoint was saved after one step of ``second``.
FIRST_SAVE_STEPS = 2


def _tested_elsewhere(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the check does not apply to the cell; None if it does.

    It takes several runs, so few cells have it. The check ``resume`` tests what a load restores.
    """
    # The cell's options without those that only a save or a load reads.
    if not {"grad_accum", "model"}.issuperset(options_beside_checkpoints(cell)):
        return "a second load is tried without that option"
    if "grad_accum" in driver.options and cell.option("grad_accum") == 1:
        return "it is tried with grad_accum, where an epoch ends in the middle of an accumulation"
    compute = PRECISIONS.get(cell.precision).compute
    if compute != "float32" and cell.world_size > 2:
        return (
            "in lower precision sums of more than two ranks depend on their order, "
            "the more, the more steps are followed"
        )
    return None


def _runs(cell: Cell, driver: type[Driver]) -> Scenario:
    """Return the runs: with ``first_save`` if the trainer keeps the earlier of two saves."""
    if driver.keeps_saves(cell):
        return RESTARTS_OF_BOTH
    return RESTARTS


@check(
    scenario=_runs,
    until=(
        # ``third`` repeats the steps of ``train`` up to this one.
        ("train", "step", SAVED + SECOND_SAVED + THIRD_STEPS - 1),
        ("second", "step", SECOND_STEPS - 1),
        ("third", "step", THIRD_STEPS - 1),
        ("first_save", "step", FIRST_SAVE_STEPS - 1),
    ),
    order=10,
    not_applicable=_tested_elsewhere,
    costly=True,
    depends_on=frozenset(),
)
def restarts(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a resumed run can be saved and resumed again, and goes on after an epoch ends.

    A run that loaded a checkpoint saves after one step, and after three in the same directory; a
    third process group loads the later of both, bit by bit, and where the trainer keeps both, a
    fourth one the earlier. All their steps have the losses and learning rates of the run that never
    stopped. The driver's own data decide where an epoch ends; those of the built-in drivers do so
    in step 8, in the middle of an accumulation.

    If it fails: a save keeps files of an earlier one, or a load takes the first checkpoint that it
    finds; counters (steps, epochs, batches, the scheduler's) begin at 0 in a resumed run, so that
    its own checkpoint, or the next end of an epoch, has those of this run alone.
    """
    train = trace.run("train")
    second = trace.run("second")
    third = trace.run("third")
    saved = second.at("save", 1)
    yield from every_rank(second.at("save"), cell.world_size, "the save of the resumed run")
    yield from every_rank(saved, cell.world_size, "the second save of the resumed run")
    yield from every_rank(third.at("load"), cell.world_size, "the second load")
    followed = list(_followed(train, second, SAVED, SECOND_STEPS, "load"))
    yield from followed
    loaded = third.at("load")
    when = "after the second load"
    saved_values = values(second, saved)
    loaded_values = values(third, loaded)
    # Findings about tensors, then about the numbers of scheduler and param groups.
    yield from differences(saved_values, loaded_values, when)
    yield from settings(saved, loaded, when)
    # A resumed run that is wrong saves what is wrong.
    if not followed:
        yield from _followed(train, third, SAVED + SECOND_SAVED, THIRD_STEPS, "second load")
    if "first_save" in trace.runs:
        yield from _loaded_first_save(cell, trace, follows=not followed)


def _loaded_first_save(cell: Cell, trace: Trace, *, follows: bool) -> Iterator[str]:
    """Yield findings for the run ``first_save``, which loads the earlier of two saves.

    Args:
        cell: The cell.
        trace: The trace, with this run.
        follows: Whether to compare its steps with those of ``train``. They are wrong anyway if the
            steps of ``second`` are.
    """
    second = trace.run("second")
    reopened = trace.run("first_save")
    saved = second.at("save")
    loaded = reopened.at("load")
    load = "load of the first of two saves"
    yield from every_rank(loaded, cell.world_size, f"the {load}")
    yield from differences(values(second, saved), values(reopened, loaded), f"after the {load}")
    yield from settings(saved, loaded, f"after the {load}")
    if follows:
        yield from _followed(trace.run("train"), reopened, SAVED + 1, FIRST_SAVE_STEPS, load)


def _followed(
    train: RunTrace, resumed: RunTrace, first: int, steps: int, load: str
) -> Iterator[str]:
    """Yield findings for the first step of a resumed run that differs from that of ``train``.

    Args:
        train: The run that never stopped.
        resumed: The resumed run.
        first: How many steps had been taken when its checkpoint was saved.
        steps: How many steps to compare.
        load: The words for the load: ``second load``.
    """
    # For each step the snapshots of all ranks, in the run that never stopped and in this one.
    first_time = []
    repeated = []
    for nth in range(steps):
        first_time.append(train.at("step", first + nth))
        repeated.append(resumed.at("step", nth))
    yield from first_other_step(
        first_time, repeated, f"after the {load}", "in the run that never stopped"
    )
