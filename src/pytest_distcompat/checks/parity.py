"""Check ``parity``: a cell trains the same model as one process in float32.

``judge.judge`` calls the check once both runs have ended. It gets a cell, one point of the test
matrix such as ``fsdp2-bf16_upcast-w2`` (strategy, precision, 2 ranks), and a trace. A run is one
process group from start to end. The trace has two runs of 20 steps:

- ``train``, on the cell's ranks, with the trainer under test;
- ``reference``, in one process, in float32 and without any wrapper, on the batches of all ranks.

For each step and rank it has a snapshot: loss, gradient norm before clipping, numbers of param
groups, and what the optimizer got. The check yields findings for the first step that differs, such
as ``step 1: the loss is 1.38; 0.69 in the reference (1.0e+00 off, 2.0e-05 allowed)``.

Tolerances and the reported norms are in ``_reference``, losses in ``_losses``, learning rates and
the like in ``_hyperparameters``. The check ``clipping``, which compares the norms of the gradients
that the optimizer got, is in a file of its own.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell of a driver (the class by which a trainer is
tested) does not have the check, or None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Snapshots, check, every_rank
from pytest_distcompat.checks._extra_norms import other_extra_state
from pytest_distcompat.checks._factors import factors_of
from pytest_distcompat.checks._hyperparameters import (
    NumbersOfParameters,
    other_hyperparameters,
    other_rates,
)
from pytest_distcompat.checks._losses import add_up, other_loss, times_ranks
from pytest_distcompat.checks._reference import (
    WHOLE_RUNS,
    Allowance,
    has_reference,
    optimizer_norm,
    other_norms,
    reference_runs,
    tolerances,
)
from pytest_distcompat.checks._tied import tied_apart
from pytest_distcompat.checks.clipping import clipping
from pytest_distcompat.model_values import in_tf32
from pytest_distcompat.scenario import STEPS
from pytest_distcompat.trace import Snapshot, Trace

#: Gradients were not clipped if their norms before and after clipping differ by less than this,
#: relatively.
UNCLIPPED = 1e-3


@check(scenario=reference_runs, until=WHOLE_RUNS, order=5, not_applicable=has_reference)
def parity(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that training equals that of one process in float32 on the same batches, over 20 steps.

    Loss and reported gradient norm agree within the precision's tolerance, learning rate, weight
    decay and the like of each parameter exactly. Tensors of extra state that the reference has too,
    such as an average of the weights, have the same norms as there. The ranks' losses are a mean if
    their average is the reference's; if instead their sum is, each rank reports its part of a sum,
    and gradients equal to the reference's in every step must prove it. Ranks, steps and
    micro-batches have different numbers of tokens, and the last step of an epoch has fewer
    micro-batches than the others.

    If it fails: a loss that is off from the first step on is computed differently, such as a mean
    of unequal micro-batches' means; the finding then says what counts alike. One that is off later
    comes from the optimizer: bfloat16 masters, gradients summed instead of averaged, another
    schedule.
    """
    loss_tolerances, norm_tolerances = tolerances(cell, trace)
    trained = trace.run("train")
    reference_run = trace.run("reference")
    # ``after_step`` returns learning rate, weight decay and so on of each parameter.
    trained_numbers = NumbersOfParameters(trained)
    reference_numbers = NumbersOfParameters(reference_run)
    # Numbers by which a wrong loss may be multiplied: ``{"the number of ranks": 2}``.
    factors = factors_of(cell, trained)
    losses_add_up = _parts_of_a_sum(cell, trace, loss_tolerances[0], norm_tolerances)
    # The largest numbers of the reference so far: the scale where its number is 0.
    largest_loss = 0.0
    largest_norm = 0.0
    # What may explain a number that is off, for the end of its finding: products of float32 in TF32
    # (10 bits of each factor), and tied parameters that FSDP2 shards as two.
    circumstances = in_tf32(trained) + tied_apart(cell, trained)
    for step in range(STEPS):
        name = f"step {step + 1}"
        snapshots = trained.at("step", step)
        references = reference_run.at("reference", step)
        yield from every_rank(snapshots, cell.world_size, name)
        if not snapshots or not references:
            yield f"{name}: no reference to compare with"
            return
        reference = references[0]
        # Such losses are made comparable: as if they were means over ranks.
        if losses_add_up:
            snapshots = tuple(times_ranks(snapshot, cell) for snapshot in snapshots)
        largest_loss = max(largest_loss, abs(reference.loss or 0.0))
        largest_norm = max(largest_norm, reference.grad_norm or 0.0)
        loss_allowance = Allowance(loss_tolerances[step], largest_loss)
        norm_allowance = Allowance(norm_tolerances[step], largest_norm)
        findings: list[str] = []
        for finding in other_loss(cell, snapshots, reference, loss_allowance, factors):
            findings.append(finding + _same_rows(cell) + circumstances)
        for finding in other_norms(snapshots, reference, norm_allowance, factors):
            findings.append(finding + circumstances)
        numbers_by_rank = trained_numbers.after_step(snapshots)
        expected_numbers = reference_numbers.after_step(references)
        rate_findings = list(other_rates(snapshots, reference))
        findings += rate_findings
        findings += other_extra_state(snapshots, reference, norm_allowance.tolerance)
        # Other learning rates are among the hyperparameters, too; they are reported only once.
        if not rate_findings:
            findings += other_hyperparameters(cell, snapshots, numbers_by_rank, expected_numbers)
        for finding in findings:
            yield f"{name}: {finding}"
        if findings:
            # Later deviations follow from this one.
            return


def _parts_of_a_sum(
    cell: Cell, trace: Trace, tolerance: float, norm_tolerances: Sequence[float]
) -> bool:
    """Tell whether each rank's loss is its part of a sum, and training is right all the same.

    A trainer may divide the loss of each rank by the tokens of all ranks, and sum the gradients
    over ranks. Then the losses add up to the reference's loss, and the gradients are equal to the
    reference's. A wrong trainer divides so and averages the gradients: its losses add up too, but
    its gradients are too small. So the gradients of all steps decide.

    Args:
        cell: The cell.
        trace: The two runs.
        tolerance: How far the first loss may be from the reference's, relatively.
        norm_tolerances: The same for the gradient norm of each step.
    """
    snapshots = trace.run("train").at("step", 0)
    references = trace.run("reference").at("reference", 0)
    if not references or not add_up(cell, snapshots, references[0], tolerance):
        return False
    if not _shows_gradients(trace, norm_tolerances):
        return False
    return not any(clipping(cell, trace))


def _shows_gradients(trace: Trace, tolerances: Sequence[float]) -> bool:
    """Tell whether the gradients of all steps are known to equal the reference's before clipping.

    After clipping, wrong gradients may have the same norm as right ones.
    """
    trained = trace.run("train")
    reference_run = trace.run("reference")
    for step, tolerance in enumerate(tolerances):
        references = reference_run.at("reference", step)
        if not references:
            return False
        if not _shows_gradients_of_step(trained.at("step", step), references[0], tolerance):
            return False
    return True


def _shows_gradients_of_step(snapshots: Snapshots, reference: Snapshot, tolerance: float) -> bool:
    """Tell whether the gradients of a step are known to equal the reference's before clipping."""
    expected = reference.grad_norm
    if expected is None:
        return False
    # ``grad_norm`` is the norm before clipping, as the trainer reports it; None if it reports none.
    lacks_norms = False
    for snapshot in snapshots:
        norm = snapshot.grad_norm
        if norm is None:
            lacks_norms = True
        elif not math.isclose(norm, expected, rel_tol=tolerance):
            return False
    if not lacks_norms:
        return True
    # Some ranks report no norm. The check ``clipping`` compares the norms after clipping, which are
    # the same numbers if the reference was not clipped in this step.
    return math.isclose(optimizer_norm(reference), expected, rel_tol=UNCLIPPED)


def _same_rows(cell: Cell) -> str:
    """Return a hint about ranks that share rows, for a wrong loss under context parallelism.

    Each of them sees only a part of each row, so no check can tell whether they are parts of the
    same rows. The text is empty without context parallelism.
    """
    if cell.cp == 1:
        return ""
    ranks = ", ".join(str(rank) for rank in cell.cp_peers(0))
    return f"; with cp {cell.cp} ranks {ranks} must be fed parts of the same rows"
