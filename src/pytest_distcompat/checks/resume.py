"""Checks ``resume``, ``observers``, ``midway`` and ``best``: state before and after an action.

- ``resume``: a new process group that loads a checkpoint goes on as if it had never stopped.
- ``observers``: a save or an export changes nothing of the training.
- ``midway``: an evaluation between two steps changes nothing of the training.
- ``best``: training that is to end with its best checkpoint ends with its weights.

``judge.judge`` calls a check once all its runs have ended. The check gets a cell, one point of the
test matrix such as ``fsdp2-bf16_upcast-w2``, and a trace. The trace has, for each run (one process
group from start to end), snapshots: what one rank recorded of its part of model, optimizer,
scheduler and scaler after one action. The check yields findings, such as ``rank 1: parameter
'lm_head.weight': other values after the load``; none if all is right.

The run ``train`` takes three steps (``SAVED``), saves, and takes further steps. The run ``resume``
loads that checkpoint and repeats the two steps after it; for ``midway`` it then evaluates and takes
one more step. Tensors are compared by digests, which are hashes of the values that a rank holds.

``_changes`` compares two snapshots of one rank. This file has the four checks, and compares the
steps of two runs. ``pairs(before, after)`` yields the two snapshots of each rank; ``every_rank``
yields a finding about ranks that lack a snapshot. A buffer of a module is *persistent* if its
state dict has it.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell does not have the check, or None;
``depends_on`` has the facets of a cell (precision, options, ...) on which the outcome depends, so
that of cells with equal facets the default profile tests only one. ``RESUMED`` are the facets that
decide what a resumed trainer restores.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import (
    RESUMED,
    UNTIL_RESUMED,
    Snapshots,
    check,
    every_rank,
    finite_losses,
    not_evaluated,
    other_mode,
    pairs,
    resume_runs,
    trained_again,
)
from pytest_distcompat.checks._changes import (
    Buffers,
    Finding,
    Value,
    group_changes,
    model_changes,
    number_in_words,
    optimized_changes,
    state_changes,
)
from pytest_distcompat.checks._tied import tied_apart
from pytest_distcompat.driver import Driver
from pytest_distcompat.model_values import GroupNumber, trainable_names, unlike
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import EVALUATE, SAVED, TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ParameterInfo, RunTrace, Snapshot, Trace

#: Relative tolerance of losses. State must come back bit by bit, but a GPU may sum a loss in any
#: order.
LOSS_TOLERANCE = 1e-4

#: Relative tolerance of losses in lower precision on more than two ranks. There a sum depends on
#: the order of its terms, and DDP changes the order when it rebuilds its buckets after the first
#: step of a run: with equal state the second loss differed by 1e-3 on 4 ranks.
ORDER_TOLERANCE = 5e-3

#: Relative tolerance of learning rates. A schedule may compute a rate from the number of the step,
#: or from the previous rate.
RATE_TOLERANCE = 1e-9


@check(scenario=resume_runs, until=UNTIL_RESUMED, order=4, depends_on=RESUMED)
def resume(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a fresh process group restores all from a checkpoint, and goes on training.

    Parameters, optimizer, scheduler and scaler are bit by bit what was saved; the optimizer holds
    the live parameters, and the same ones are trainable. The next two losses and learning rates are
    those of the uninterrupted run. A buffer that each rank fills from its own data (BatchNorm) may
    come back as any rank saved it
    (https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).

    If it fails: state was not saved, or was loaded into an optimizer that has none before its first
    step (https://github.com/huggingface/accelerate/pull/3904). The first loss depends on parameters
    only, the second on the optimizer too.
    """
    train = trace.run("train")
    resumed = trace.run("resume")
    trained = train.at("step", SAVED - 1)
    saved = train.at("save")
    loaded = resumed.at("load")
    yield from every_rank(trained, cell.world_size, "three steps")
    yield from every_rank(saved, cell.world_size, "save")
    yield from every_rank(loaded, cell.world_size, "load")
    yield from _first_infinite_losses(train)
    # A rank that takes three steps during the load, in place of loading, would have equal state.
    yield from trained_again(loaded, _before_save(train))
    # The save itself must change nothing, or what was saved is not what was trained.
    for before, after in pairs(trained, saved):
        yield from _texts(state_changes(before, after, "save"))
    saved = _without_nonpersistent_buffers(cell, train, saved)
    loaded = _without_nonpersistent_buffers(cell, train, loaded)
    allowed_buffers = _buffers_of_ranks(saved)
    for before, after in pairs(saved, loaded):
        yield from _texts(optimized_changes(before, after))
    # A checkpoint of the model alone has no optimizer or scheduler, so that training cannot go on
    # as before.
    if cell.option("save_only_model"):
        for before, after in pairs(saved, loaded):
            yield from _texts(model_changes(before, after, "load", allowed_buffers))
        return
    for before, after in pairs(saved, loaded):
        yield from _texts(state_changes(before, after, "load", allowed_buffers))
        if before.scaler != after.scaler:
            yield (
                f"rank {after.rank}: the gradient scaler is at {after.scaler}; "
                f"saved at {before.scaler}"
            )
        if before.scheduler != after.scheduler:
            yield (
                f"rank {after.rank}: scheduler is at {after.scheduler!r}; "
                f"saved at {before.scheduler!r}"
            )
    yield from _later_steps(
        cell, train, resumed, compares_groups=_same_groups_loaded(saved, loaded)
    )


def _texts(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield the text of each finding."""
    for finding in findings:
        yield str(finding)


def _first_infinite_losses(train: RunTrace) -> list[str]:
    """Return a finding for each rank with an infinite loss, in the first step that has any."""
    for nth in range(SAVED + 2):
        with_loss = []
        for snapshot in train.at("step", nth):
            # ``_loss_changes`` reports ranks without a loss.
            if snapshot.loss is not None:
                with_loss.append(snapshot)
        step = f"step {nth + 1}"
        infinite = list(finite_losses(with_loss, step))
        if infinite:
            # Losses of later steps are infinite because of it.
            return infinite
    return []


def _before_save(train: RunTrace) -> list[Snapshot]:
    """Return all ranks' snapshots of the steps before the save."""
    snapshots: list[Snapshot] = []
    for nth in range(SAVED):
        snapshots += train.at("step", nth)
    return snapshots


def _same_groups_loaded(saved: Snapshots, loaded: Snapshots) -> bool:
    """Tell whether each rank has loaded the numbers of param groups (``lr``) that it saved."""
    for before, after in pairs(saved, loaded):
        if list(group_changes(before, after, "load")):
            return False
    return True


def _later_steps(
    cell: Cell, train: RunTrace, resumed: RunTrace, *, compares_groups: bool
) -> Iterator[str]:
    """Yield findings for the two steps after the load that differ from those after the save.

    Args:
        cell: The cell.
        train: The run that never stopped.
        resumed: The run that loaded its checkpoint.
        compares_groups: Whether to compare the numbers of param groups. If they differ after the
            load, they differ after every later step.
    """
    tolerance = _loss_tolerance(cell)
    for nth in (0, 1):
        name = f"step {nth + 1}"
        expected = train.at("step", SAVED + nth)
        steps = resumed.at("step", nth)
        yield from every_rank(expected, cell.world_size, f"{name} after the save")
        yield from every_rank(steps, cell.world_size, f"{name} after the load")
        # Later steps have the modes of the first one, so one finding is enough.
        if nth == 0:
            when = f"{name} after the load"
            for before, after in pairs(expected, steps):
                yield from other_mode(before, after, when, "in the run that never stopped")
        for text in _texts(_loss_changes(nth, expected, steps, tolerance)):
            # If tied parameters are sharded as two, that is a likely reason, and the hint says so.
            hint = tied_apart(cell, train)
            yield f"{text}{hint}"
        if compares_groups:
            changes = list(_later_group_changes(nth, expected, steps))
            yield from _texts(changes)
            # Numbers that differ after this step differ after the next, too.
            compares_groups = not changes


def _loss_tolerance(cell: Cell) -> float:
    """Return how far losses of the same step of two runs may be apart, relative to their value."""
    if PRECISIONS.get(cell.precision).compute == "float32" or cell.world_size <= 2:
        return LOSS_TOLERANCE
    return ORDER_TOLERANCE


def _without_nonpersistent_buffers(cell: Cell, run: RunTrace, snapshots: Snapshots) -> Snapshots:
    """Return the snapshots without non-persistent buffers, which a new process computes anew."""
    if run.unwrapped is None or not run.unwrapped.buffers:
        return snapshots
    strategy = STRATEGIES.get(cell.strategy)
    # Name in the unwrapped model -> whether the buffer is persistent. Names in the live model may
    # have prefixes of wrappers, which ``canonical`` removes.
    persistent = {info.name: info.persistent for info in run.unwrapped.buffers}
    kept: list[Snapshot] = []
    for snapshot in snapshots:
        model = snapshot.model
        if model is not None:
            buffers: list[ParameterInfo] = []
            for info in model.buffers:
                name = strategy.canonical(info.name, cell, persistent)
                if persistent.get(name, False):
                    buffers.append(info)
            model = replace(model, buffers=tuple(buffers))
        kept.append(replace(snapshot, model=model))
    return tuple(kept)


def _buffers_of_ranks(snapshots: Snapshots) -> Buffers:
    """Return name of a buffer -> the values that any rank has of it.

    Each rank may fill a buffer from its own data. After an action it may have any of these values.
    """
    values: dict[str, set[Value]] = defaultdict(set)
    for snapshot in snapshots:
        for info in snapshot.buffers:
            value = Value(info.digest, info.dtype)
            values[info.name].add(value)
    return values


@dataclass(frozen=True)
class _LaterGroupNumber(Finding):
    """A number of a param group differs between two runs after a step.

    They are the resumed run and the run that never stopped. ``nth`` counts steps from 0.
    """

    number: GroupNumber
    nth: int

    @property
    def text(self) -> str:
        number = self.number
        expected = f"{number.before:.6g} in the run that never stopped"
        actual = f"{number.after:.6g} after step {self.nth + 1} of the resumed run"
        return f"{number_in_words(number)} is {actual}; {expected}"


@dataclass(frozen=True)
class _MissingLoss(Finding):
    """A rank has no loss to compare."""

    @property
    def text(self) -> str:
        return "no loss to compare; expected step() to return it"


@dataclass(frozen=True)
class _LossChange(Finding):
    """A step after the load has another loss than the same step of the run that never stopped.

    ``nth`` counts the steps after the load from 0.
    """

    nth: int
    before: float
    after: float

    @property
    def text(self) -> str:
        loss = f"loss {self.nth + 1} after the load is {self.after:.6g}"
        expected = f"{self.before:.6g} in the run that never stopped"
        return f"{loss}; {expected}"


# Comparisons of the same step of two runs.


def _loss_changes(
    nth: int, expected: Snapshots, resumed: Snapshots, tolerance: float
) -> Iterator[Finding]:
    """Yield findings for losses of a step after the load that differ by more than the tolerance."""
    for before, after in pairs(expected, resumed):
        if before.loss is None or after.loss is None:
            yield _MissingLoss(after.rank)
        elif not math.isfinite(before.loss):
            # ``_first_infinite_losses`` reports it.
            continue
        elif not math.isclose(before.loss, after.loss, rel_tol=tolerance):
            yield _LossChange(after.rank, nth, before.loss, after.loss)


def _later_group_changes(
    nth: int, expected: Snapshots, resumed: Snapshots
) -> Iterator[_LaterGroupNumber]:
    """Yield findings for numbers of param groups that differ after a step.

    The loss of the next step may be too close to show another learning rate.
    """
    for before, after in pairs(expected, resumed):
        for number in unlike(before.param_groups, after.param_groups, RATE_TOLERANCE):
            # Only numbers that both runs have can be compared.
            if number.before is not None and number.after is not None:
                yield _LaterGroupNumber(after.rank, number, nth)


def _later_rate_changes(
    nth: int, expected: Snapshots, resumed: Snapshots
) -> Iterator[_LaterGroupNumber]:
    """Yield findings for learning rates after a step, as ``_later_group_changes`` does."""
    for change in _later_group_changes(nth, expected, resumed):
        if change.number.key == "lr":
            yield change


@check(scenario=TRAIN, until=(("train", "save", 0), ("train", "exported", 0)), order=9)
def observers(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that neither saving a checkpoint nor exporting the weights changes what is trained.

    Parameters, buffers, optimizer, scheduler, scaler and torch's random state stay equal bit by
    bit, and the step after a save has the same modules in training mode as that before it.

    If it fails: look for a step of the optimizer that creates state to save, for weights that are
    cast or moved in place, for what draws random numbers, and for an evaluation without
    ``model.train()`` after it.
    """
    train = trace.run("train")
    trained = train.at("step", SAVED - 1)
    trained_further = train.at("step", SAVED)
    # An evaluation in the save shows in the next step, whose modules are still in evaluation mode.
    for before, after in pairs(trained, trained_further):
        yield from other_mode(before, after, "the step after the save", "before it")
    yield from _observed(cell, trained, train.at("save"), "save")
    # The action ``export`` takes its snapshot before the driver exports, ``exported`` after it.
    before_export = train.at("export")
    yield from _observed(cell, before_export, train.at("exported"), "export")


@check(
    scenario=resume_runs,
    until=(("train", "step", 5), ("resume", "step", 2)),
    order=9,
    not_applicable=not_evaluated,
    depends_on=RESUMED,
)
def midway(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that an evaluation between two steps changes nothing of the training.

    Parameters, buffers, optimizer, scheduler, scaler and torch's random state stay equal bit by
    bit. The step after it has the same modules in training mode as that before it, and the loss of
    the run that never evaluated. A resumed run evaluates, by the driver's call ``evaluate()``; if
    its steps before are wrong, which ``resume`` reports, no loss is compared. The learning rate is
    that of the run that never stopped; one that was another already before the evaluation is the
    only finding about later steps. A buffer that each rank fills from its own data may become that
    of another rank, as DDP sends those of rank 0 before each forward pass.

    If it fails: call ``model.train()`` after it; look for what draws random numbers, such as the
    seed of a new iterator of a loader; for parameters that stay gathered or cast; for a count of
    batches or steps that goes on.
    """
    train = trace.run("train")
    evaluating = trace.run("resume")
    before = evaluating.at("step", 1)
    after = evaluating.at("step", 2)
    yield from every_rank(after, cell.world_size, "the step after the evaluation")
    evaluated = evaluating.at(EVALUATE)
    # A buffer may change to the value of another rank, see the docstring.
    yield from _observed(cell, before, evaluated, "evaluation", _buffers_of_ranks(before))
    for snapshot, following in pairs(before, after):
        yield from other_mode(snapshot, following, "the step after the evaluation", "before it")
    tolerance = _loss_tolerance(cell)
    for nth in (0, 1):
        steps = evaluating.at("step", nth)
        expected_steps = train.at("step", SAVED + nth)
        # If the run resumed wrongly, the loss after the evaluation differs whatever the evaluation
        # does. The check ``resume`` reports that.
        if any(_loss_changes(nth, expected_steps, steps, tolerance)):
            return
        changes = list(_later_rate_changes(nth, expected_steps, steps))
        if changes:
            # With another rate the loss is another one, whatever the evaluation does.
            yield from _texts(changes)
            return
    expected_steps = train.at("step", SAVED + 2)
    for expected, actual in pairs(expected_steps, after):
        if expected.loss is None or actual.loss is None:
            continue
        if not math.isclose(expected.loss, actual.loss, rel_tol=tolerance):
            yield str(_LossAfterEvaluation(actual.rank, expected.loss, actual.loss))
    yield from _texts(_later_rate_changes(2, expected_steps, after))


def _ends_with_last_step(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the check ``best`` does not apply to the cell; None if it does."""
    if not driver.loads_best(cell):
        return "training ends with the weights of its last step: loads_best() of the driver"
    if not driver.can("export"):
        return "the weights are read before an export, and the driver has none"
    return None


@check(
    scenario=TRAIN,
    until=(("train", "save", 0), ("train", "export", 0)),
    order=10,
    not_applicable=_ends_with_last_step,
    depends_on=RESUMED,
)
def best(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a training which is to end with its best checkpoint has its weights then.

    Parameters and buffers are bit by bit those of the only checkpoint of the run ``train``, 17
    steps before its end.

    If it fails: the checkpoint was not found, which trainers only warn of; its weights were loaded
    into a model that is not the wrapped one, or under names that it does not have.
    """
    train = trace.run("train")
    saved = _without_nonpersistent_buffers(cell, train, train.at("save"))
    # The run takes 20 steps and saves after the third. The snapshot of ``export`` is taken before
    # the driver exports, so at the end of the training.
    ended = _without_nonpersistent_buffers(cell, train, train.at("export"))
    yield from every_rank(ended, cell.world_size, "the end of the training")
    for before, after in pairs(saved, ended):
        changes = model_changes(before, after, "end of the training", _buffers_of_ranks(saved))
        yield from _texts(changes)


@dataclass(frozen=True)
class _LossAfterEvaluation:
    """The loss of the step after an evaluation is not that of the run that never evaluated."""

    rank: int
    expected: float
    actual: float

    def __str__(self) -> str:
        loss = f"the loss of the step after the evaluation is {self.actual:.6g}"
        return f"rank {self.rank}: {loss}; {self.expected:.6g} in the run that never evaluated"


def _observed(
    cell: Cell,
    before_action: Snapshots,
    after_action: Snapshots,
    action: str,
    buffers: Buffers | None = None,
) -> Iterator[str]:
    """Yield findings for what an action changed that must change nothing.

    Args:
        cell: The cell.
        before_action: The snapshots of all ranks before the action.
        after_action: Those after it.
        action: The action in words: ``save``, ``export`` or ``evaluation``.
        buffers: Values that a buffer may have after the action besides its own; None if each buffer
            must keep its value.
    """
    yield from every_rank(after_action, cell.world_size, action)
    for before, after in pairs(before_action, after_action):
        # Without an export() of the driver there is no model in these snapshots.
        if before.model is None or after.model is None:
            continue
        yield from _texts(state_changes(before, after, action, buffers))
        another = f"is another after the {action}"
        if before.scheduler != after.scheduler:
            yield f"rank {after.rank}: the scheduler {another}"
        if before.scaler != after.scaler:
            yield f"rank {after.rank}: the gradient scaler {another}"
        if before.rng != after.rng:
            yield f"rank {after.rank}: the random state {another}"
        if trainable_names(before.parameters) != trainable_names(after.parameters):
            yield f"rank {after.rank}: the set of trainable parameters {another}"
