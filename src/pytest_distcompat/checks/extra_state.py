"""Check ``extra_state``: state beside model and optimizer is kept, restored, and alike on ranks.

A driver names such state, for example an average of the weights or the place in the data:
``extra_state = {"ema": ExtraState(...)}``. Each ``ExtraState`` says what is expected: that the
state changes in training, is alike on all ranks, comes back after a load.

``judge.judge`` calls the check once both runs have ended. It gets a cell, one point of the test
matrix such as ``ddp-fp32-w2-ema``, and a trace with two runs (a run is one process group from start
to end): ``train`` takes three steps, saves, and goes on; ``resume`` loads that checkpoint and
repeats the next two steps. For each rank and action the trace has a snapshot with the values of
each state, an ``ExtraStateInfo``: place in the state (``shadow.inlet.weight``) -> text of a number,
or digest of a tensor. Those of numbers and tensors with fractions are ``rounded``, all others are
``exact``; ``expected`` is the driver's ``ExtraState``. The check yields findings, such as ``rank 1:
ema.decay is another after the load than was saved``.

The comparisons are public, because ``ext.scripts.roundtrip`` makes them for scripts.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell does not have the check, or None;
``depends_on`` has the facets of a cell (precision, options, ...) on which the outcome depends, so
that of cells with equal facets the default profile tests only one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import (
    RESUMED,
    UNTIL_RESUMED,
    check,
    every_rank,
    pairs,
    resume_runs,
)
from pytest_distcompat.driver import Driver
from pytest_distcompat.scenario import SAVED
from pytest_distcompat.trace import ExtraStateInfo, Snapshot, Trace

#: Place in a state -> text of the number there, or digest (hash) of the tensor: ``{"step": "3"}``.
_TextByPlace = Mapping[str, str]


def _no_extra_state(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the cell does not have the check; None if it does."""
    if not driver.extra_state_in(cell):
        return "the driver names no state in extra_state"
    if cell.option("save_only_model"):
        return "checkpoints hold weights alone"
    return None


@check(
    scenario=resume_runs,
    until=UNTIL_RESUMED,
    order=4,
    not_applicable=_no_extra_state,
    depends_on=RESUMED | {"ema"},
)
def extra_state(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that extra state changes, comes back after a load, and is alike on ranks.

    Extra state is what the driver names in ``extra_state``; of each the check asks what its
    ``ExtraState`` expects. It changes within the first three steps, and not by a save. After a load
    it is bit by bit what was saved. In the two steps after that whole numbers and texts are those
    of the run that never stopped.

    If it fails: add the state to what is saved; load it on every rank, after what creates it;
    update it on every rank, from values that all ranks have.
    """
    train = trace.run("train")
    resumed = trace.run("resume")
    saved = train.at("save")
    loaded = resumed.at("load")
    # Findings for ranks without a snapshot.
    yield from every_rank(saved, cell.world_size, "save")
    yield from every_rank(loaded, cell.world_size, "load")
    snapshots_after = {"build": train.at("build")}
    for nth in range(SAVED + 2):
        snapshots_after[f"step {nth + 1}"] = train.at("step", nth)
    yield from unlike_on_ranks(snapshots_after)
    yield from unchanged(train.at("build"), train.at("step", SAVED - 1), "three steps")
    # Snapshots of one rank before and after an action.
    for before, after in pairs(train.at("step", SAVED - 1), saved):
        for difference in other_states(before, after):
            yield f"rank {after.rank}: {difference} is another after the save than before"
    lost: set[str] = set()
    for before, after in pairs(saved, loaded):
        for difference in other_states(before, after):
            lost.add(difference.state)
            yield f"rank {after.rank}: {difference} is another after the load than was saved"
    for nth in range(2):
        when = f"in step {nth + 1} after the load"
        expected = train.at("step", SAVED + nth)
        for before, after in pairs(expected, resumed.at("step", nth)):
            for difference in other_states(before, after, exact=True):
                # What was lost differs in every later step.
                if difference.state in lost:
                    continue
                finding = f"{difference} is another {when} than in the run that never stopped"
                yield f"rank {after.rank}: {finding}"


@dataclass(frozen=True)
class StateDifference:
    """The first difference between two values of a state.

    Attributes:
        state: The name of the state.
        place: Where in the state it is, such as a key of its ``state_dict()``; empty for a state of
            one value.
    """

    state: str
    place: str

    def __str__(self) -> str:
        if not self.place:
            return self.state
        return f"{self.state}.{self.place}"


def unlike_on_ranks(snapshots_after: Mapping[str, Sequence[Snapshot]]) -> Iterator[str]:
    """Yield a finding for each state that differs between ranks, after the first such action.

    Args:
        snapshots_after: Action in words (``build``, ``step 1``) -> the snapshots of all ranks after
            it, in the order of the actions.
    """
    unlike: set[str] = set()
    for action, snapshots in snapshots_after.items():
        for snapshot in snapshots[1:]:
            first = snapshots[0]
            for difference in _unlike_first(first, snapshot):
                if difference.state in unlike:
                    continue
                unlike.add(difference.state)
                finding = f"{difference} is another than on rank {first.rank} after {action}"
                yield f"rank {snapshot.rank}: {finding}"


def _unlike_first(first: Snapshot, snapshot: Snapshot) -> Iterator[StateDifference]:
    """Yield the first difference of each state that must be alike on two ranks, and is not."""
    first_states = _states(first)
    for info in snapshot.extra:
        peer = first_states.get(info.name)
        if peer is None or not info.expected.alike:
            continue
        place = _first_difference(peer.values, info.values)
        if place is not None:
            yield StateDifference(info.name, place)


def unchanged(
    built: tuple[Snapshot, ...], stepped: tuple[Snapshot, ...], steps: str
) -> Iterator[str]:
    """Yield a finding for each state that should have changed on a rank, and has not.

    Args:
        built: The snapshots of all ranks before some steps.
        stepped: The snapshots after these steps.
        steps: The words for the steps: ``three steps``.
    """
    for before, after in pairs(built, stepped):
        states_before = _states(before)
        for info in after.extra:
            if not info.expected.changes or info.name not in states_before:
                continue
            if states_before[info.name].values == info.values:
                yield f"rank {after.rank}: {info.name} has not changed in {steps}"


def other_states(
    before: Snapshot, after: Snapshot, *, exact: bool = False
) -> Iterator[StateDifference]:
    """Yield the first difference of each state that a checkpoint must bring back.

    Args:
        before: A snapshot.
        after: A later snapshot of the same rank.
        exact: Whether numbers with a fraction are left out. They may differ in their last digits if
            the same is computed again, in another order.
    """
    states_before = _states(before)
    for info in after.extra:
        other = states_before.get(info.name)
        if other is None or not info.expected.comes_back:
            continue
        place = _first_difference(other.exact, info.exact)
        if place is None and not exact:
            place = _first_difference(other.rounded, info.rounded)
        if place is not None:
            yield StateDifference(info.name, place)


def _states(snapshot: Snapshot) -> dict[str, ExtraStateInfo]:
    """Return the extra state of a rank by name."""
    return {info.name: info for info in snapshot.extra}


def _first_difference(values: _TextByPlace, others: _TextByPlace) -> str | None:
    """Return the first place at which two states differ, None if there is none.

    The place of a shard of a tensor names the part that it is. Two ranks with different shards have
    no such place in common, so a shard that only one of them has is no difference.
    """
    for place in sorted(values.keys() | others.keys()):
        text = values.get(place)
        other_text = others.get(place)
        if text == other_text:
            continue
        is_missing = text is None or other_text is None
        if is_missing and _is_part(place):
            continue
        return place
    return None


def _is_part(place: str) -> bool:
    """Tell whether the value at a place is a shard of a tensor: such places end in parentheses."""
    return place.endswith(")")
