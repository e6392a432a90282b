"""Does a trainer do what one process does, whatever its user calls in whatever order?

A *walk* is a sequence of calls of a live trainer, such as ``step(), micro(), save(), step()``.
``explore`` makes walks and runs them: the trainer on several ranks (processes), and the same calls
on a *reference*, one process with the bare, *unwrapped* model. This module compares the two after
each call. The check ``walk`` does that for all walks of a cell (strategy, precision, number of
ranks); ``explore.run_walk`` calls ``findings`` for one walk.

The input is a *trace*: its *runs*, by name. A run is one process group from start to end. The walk
``walk-1a2b3c4d`` has ``walk-1a2b3c4d-0``, ``walk-1a2b3c4d-1``, ... (a new process group after each
call ``resume``, which saves, starts anew and loads), and ``walk-1a2b3c4d-reference``. Each run has
*snapshots*: what a probe in each rank recorded after each action, such as a call. The result is
findings as text, none if all is equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_distcompat.calls import REFERENCE_CALL, RESUME, Call
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import Names, named_ranks
from pytest_distcompat.ext.walk.exact import (
    changes,
    must_change_nothing,
    reference_differences,
    structure_changes,
)
from pytest_distcompat.ext.walk.inexact import (
    inexact_live_values,
    inexact_loss,
    inexact_numbers,
    inexact_returned_values,
)
from pytest_distcompat.trace import RunTrace, Snapshot, Trace


def walk(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a live trainer does what one process does, in whatever order its user calls it.

    Walks that failed once are replayed, new ones are drawn; the first that fails is shrunk.
    Observers (unwrap, state dict, evaluate) must change no bit. After each call names, dtypes,
    shards, modes, losses and parameters are compared.

    If it fails: repeat the walk alone (``distcompat walk --calls``), or run the script that it
    prints.
    """
    for name, run in trace.runs.items():
        # Each walk has one run of a reference.
        if not name.endswith("-reference"):
            continue
        passed, problems = findings(cell, trace, name)
        walked = _recorded_calls(run)[: passed + 1]
        calls = [str(recorded.call) for recorded in walked]
        for problem in problems:
            yield f"{', '.join(calls)}: {problem}"


def findings(cell: Cell, trace: Trace, reference: str) -> tuple[int, list[str]]:
    """Compare a walk with its reference, call by call, until they differ.

    Args:
        cell: The cell of the walk.
        trace: A trace that has the runs of the walk.
        reference: The name of the reference's run.

    Returns:
        The number of calls after which the walk was equal to its reference, and the findings after
        the next call: none if the whole walk was equal.
    """
    reference_run = trace.runs[reference]
    calls = _recorded_calls(reference_run)
    for passed, recorded in enumerate(calls):
        # A dict, because it keeps the order and has each finding only once.
        problems: dict[str, None] = {}
        for text in _after_call(cell, trace, reference, recorded):
            problems[f"{recorded.call}: {text}"] = None
        if problems:
            return passed, list(problems)
    if reference_run.end is not None:
        return len(calls), [f"the reference: {reference_run.end.message}"]
    return len(calls), []


@dataclass(frozen=True)
class _RecordedCall:
    """Place of a call's snapshots in a trace.

    Attributes:
        call: The call.
        run: The name of the walk's run that makes it: ``walk-1a2b3c4d-0``.
        index: Its index among the actions of that run, from 0. The first two are ``build_model``
            and ``build``.
        reference_index: Its index in the run of the reference.
    """

    call: Call
    run: str
    index: int
    reference_index: int


def _recorded_calls(reference: RunTrace) -> list[_RecordedCall]:
    """Return the calls that the reference made, in order.

    If the reference failed, the last calls of the walk may be missing. A call is an action of the
    reference: ``reference step(clip='no')``.
    """
    actions = {snapshot.index: snapshot.action for snapshot in reference.snapshots}
    calls: list[_RecordedCall] = []
    process_group = 0
    # The actions 0 and 1 are ``build_model`` and ``build``: the first call is action 2.
    index = 1
    for reference_index, action in sorted(actions.items()):
        if not action.startswith(REFERENCE_CALL):
            continue
        call = Call.parse(action.removeprefix(REFERENCE_CALL))
        if call.name == RESUME:
            # ``resume`` is no action of the trainer: the next process group builds (0 and 1), and
            # its load, action 2, is what is compared.
            process_group += 1
            index = 2
        else:
            index += 1
        run = reference.name.replace("reference", str(process_group))
        calls.append(_RecordedCall(call, run, index, reference_index))
    return calls


def _after_call(cell: Cell, trace: Trace, reference: str, recorded: _RecordedCall) -> Iterator[str]:
    """Yield how the trainer differs from the reference after a call.

    Args:
        cell: The cell of the walk.
        trace: The trace with the runs of the walk.
        reference: The name of the reference's run.
        recorded: The call.
    """
    call = recorded.call
    run = trace.runs[recorded.run]
    snapshots = run.at_index(recorded.index)
    reference_snapshots = trace.runs[reference].at_index(recorded.reference_index)
    if run.end is not None and len(snapshots) < run.world_size:
        # The run failed in this call. Its message is "rank 1 raised ValueError: ...". Without the
        # rank, because it is chance which one raises first.
        _, _, exception = run.end.message.partition(" raised ")
        message = exception or run.end.message
        yield f"{run.end.kind}: {message}"
        return
    assert run.unwrapped is not None
    # Maps a name in the wrapped model, ``module.layer.weight``, to that in the unwrapped one.
    names = Names(run, run.unwrapped)
    # A trainer that resumes may wrap the model only when it loads, after its build. So the
    # structure in a later run is compared with the build of the first.
    first_run = trace.runs[reference.replace("reference", "0")]
    built = _by_rank(first_run.at("build"))
    before = _by_rank(run.at_index(recorded.index - 1))
    expected = reference_snapshots[0]
    # First what each rank has by itself: what must be equal bit by bit (``exact``), and numbers
    # (``inexact``). Most findings are those of all ranks: each is said once, with the ranks.
    ranks_by_finding: dict[str, list[int]] = defaultdict(list)
    for snapshot in snapshots:
        texts: list[str] = []
        if must_change_nothing(call, snapshot):
            texts += changes(before[snapshot.rank], snapshot)
        # No call may change names, shapes, dtypes or shards of parameters.
        texts += structure_changes(built[snapshot.rank], snapshot)
        texts += reference_differences(names, snapshot, expected)
        texts += inexact_numbers(cell, call, snapshot, expected)
        for text in texts:
            ranks_by_finding[text].append(snapshot.rank)
    for text, ranks in ranks_by_finding.items():
        where = named_ranks(ranks, run.world_size)
        yield f"{where}: {text}"
    # Then what all ranks together give, and rounding may change (``inexact``).
    yield from inexact_loss(cell, call, snapshots, expected)
    yield from inexact_live_values(cell, names, snapshots, expected)
    yield from inexact_returned_values(cell, names, snapshots, expected)


def _by_rank(snapshots: Iterable[Snapshot]) -> dict[int, Snapshot]:
    """Return the snapshots, of which each rank has one, by rank."""
    return {snapshot.rank: snapshot for snapshot in snapshots}
