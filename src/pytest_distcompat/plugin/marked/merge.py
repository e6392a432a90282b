"""One outcome of a marked test, from the logs and exits of all its ranks.

A test with ``@pytest.mark.distcompat(world_size=2)`` runs on two *ranks*, the processes of one
process group, and is one item in pytest. After the ranks have ended, ``marked.run`` calls ``merge``
with the launcher's ``Ending``: how each process ended (a ``RankEnd``), and what each rank logged. A
rank logs a ``Phase`` for its setup, its call and its teardown. ``merge`` returns one ``Outcome``,
as ``Outcome("failed", "rank 1 failed: ...")``.

The outcome is never better than that of the worst rank, and ranks that disagree are a failure. The
rank that failed first is the *cause*. A rank that only *lost its peer* (another rank is gone) or
was *stopped* by the launcher because of another rank is a consequence. A rank that skipped, or
failed as its xfail mark expects, while others go on is *excused*.

A failure is *hard* if it is more than an exception: a crash, a hang, a leak. No xfail mark excuses
a hard failure in pytest's process; the ranks have applied their marks to exceptions themselves.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_distcompat.events import of_kind
from pytest_distcompat.plugin.marked.outcome import Outcome
from pytest_distcompat.plugin.marked.phase import (
    SKIPPED_ELSEWHERE,
    STRICT_XPASS,
    XFAILED,
    Phase,
    Properties,
    Sections,
)
from pytest_distcompat.plugin.marked.subtests import unfinished_phase

if TYPE_CHECKING:
    from pytest_distcompat.launch.forensics.ending import Ending, RankEnd

#: The title of the section with output that a rank wrote past pytest's capture.
UNCAPTURED = "Uncaptured output"

#: The property of a failed test with the number of the rank that failed first.
RANK = "distcompat_rank"

#: The values of ``RankEnd.status`` of ranks that do not explain a failure: they ended well, or
#: because of another rank.
NO_CAUSE = frozenset({"done", "lost peer", "stopped"})

#: The values of ``RankEnd.kind`` that a test allows: a rank that skipped, and one that failed as
#: its xfail mark expects.
EXCUSED = frozenset({XFAILED, SKIPPED_ELSEWHERE})


@dataclass(frozen=True)
class _LoggedPhases:
    """What the ranks logged of a test.

    Attributes:
        finished: Each rank to the phases that it finished, in order: setup, call, teardown.
        unfinished: A rank to the phase in which it ended, as far as its subtests tell. Only ranks
            that logged subtests in that phase are in it.
    """

    finished: Mapping[int, list[Phase]]
    unfinished: Mapping[int, Phase]

    @classmethod
    def of(cls, ending: Ending) -> _LoggedPhases:
        """Read the logs of all ranks."""
        finished: dict[int, list[Phase]] = {}
        unfinished: dict[int, Phase] = {}
        for rank, events in ending.events.items():
            logged = of_kind(Phase, events)
            finished[rank] = []
            for phase in logged:
                if not phase.subtest:
                    finished[rank].append(phase)
            # A rank that was killed in a phase has not logged it, but its subtests before that.
            last = unfinished_phase(logged)
            if last is not None:
                unfinished[rank] = last
        return cls(finished, unfinished)

    def of_rank(self, rank: int) -> list[Phase]:
        """Return the phases of a rank, the unfinished one last."""
        phases = list(self.finished[rank])
        if rank in self.unfinished:
            phases.append(self.unfinished[rank])
        return phases

    def with_outcome(self, outcome: str) -> list[Phase]:
        """Return the whole phases of all ranks with that outcome, rank by rank."""
        phases = []
        for of_rank in self.finished.values():
            for phase in of_rank:
                if phase.outcome == outcome:
                    phases.append(phase)
        return phases


def merge(ending: Ending) -> Outcome:
    """Return the outcome of a test from the logs and exits of all its ranks."""
    phases = _LoggedPhases.of(ending)
    ending = count_subtests(ending, phases.unfinished)
    if ending.failed:
        outcome = _outcome_of_failed_run(ending, phases)
    else:
        outcome = _outcome_of_finished_run(phases)
    sections = _sections(phases, ending)
    properties = _properties(phases) + outcome.properties
    return dataclasses.replace(outcome, sections=sections, properties=properties)


def _outcome_of_failed_run(ending: Ending, phases: _LoggedPhases) -> Outcome:
    """Return the outcome of a run in which a rank raised, crashed or hung, or something leaked.

    Ranks that were excused have raised too.
    """
    expected = _expected_failure(ending)
    if expected is not None:
        xfailed = Outcome("xfailed", expected.message.removeprefix("raised xfailed: "))
        return _unexpected_pass(phases) or xfailed
    # Something else went wrong. The status of ranks that skipped or xfailed is changed, so that
    # they come after those that failed or hung.
    ranks = []
    for end in ending.ranks:
        status = "excused" if end.kind in EXCUSED else end.status
        ranks.append(dataclasses.replace(end, status=status))
    ending = dataclasses.replace(ending, ranks=tuple(ranks))
    properties: Properties = ()
    location = None
    cause = ending.cause
    if cause is not None:
        location = _failed_at(phases.of_rank(cause.rank))
        if not ending.launch_error:
            properties = ((RANK, cause.rank),)
    # Any rank may have ended by more than an exception, even if another rank raised first.
    is_stuck = any(end.status == "stuck" for end in ending.ranks)
    # "rank 1 raised failed in setup: ..." reads better as "rank 1 failed in setup: ...".
    text = re.sub(r"raised (?=failed|skipped|xfailed)", "", ending.text())
    return Outcome(
        "failed",
        text,
        hard=ending.kind != "raised" or is_stuck,
        location=location,
        properties=properties,
        assertion=_failed_by_assertion(ending, phases),
    )


def _expected_failure(ending: Ending) -> RankEnd | None:
    """Return a rank that failed as its xfail mark expects.

    None if anything else went wrong on any rank.
    """
    if ending.kind != "raised":
        return None
    for end in ending.ranks:
        if end.status not in NO_CAUSE and end.kind not in EXCUSED:
            return None
    if ending.cause is not None and ending.cause.kind == XFAILED:
        return ending.cause
    for end in ending.ranks:
        if end.kind == XFAILED:
            return end
    return None


def _failed_at(phases: Sequence[Phase]) -> tuple[str, int, str] | None:
    """Return path, line and message of the first failed phase of a rank; None if none failed."""
    for phase in phases:
        if phase.outcome == "failed":
            return phase.location
    return None


def _failed_by_assertion(ending: Ending, phases: _LoggedPhases) -> bool:
    """Tell whether each rank that is a cause failed by assertions alone; False without a cause.

    ``pytest.fail`` counts as an assertion.
    """
    causes = 0
    for end in ending.ranks:
        if end.status in NO_CAUSE or end.status == "excused":
            continue
        causes += 1
        kinds = set()
        for phase in phases.of_rank(end.rank):
            if phase.outcome == "failed":
                kinds.add(phase.assertion)
        if kinds != {True}:
            return False
    return causes > 0


def _outcome_of_finished_run(phases: _LoggedPhases) -> Outcome:
    """Return the outcome of a run in which all ranks ended well."""
    skipped = _skipped(phases)
    if skipped is not None:
        return skipped
    expected_failures = phases.with_outcome("xfailed")
    if expected_failures:
        return _unexpected_pass(phases) or Outcome("xfailed", expected_failures[0].message)
    # A rank that is done without a teardown left pytest's run of the item in some way of its own.
    incomplete = []
    for rank, of_rank in phases.finished.items():
        if not any(phase.when == "teardown" for phase in of_rank):
            incomplete.append(str(rank))
    if incomplete:
        ranks = ", ".join(incomplete)
        text = f"rank {ranks} ended without running the test to its end"
        return Outcome("failed", text, hard=True)
    # With a text if any rank has a strict xfail mark: see ``Outcome.text``.
    strict = _strict_passes(phases)
    text = strict[0] if strict else ""
    return Outcome("passed", text)


def _skipped(phases: _LoggedPhases) -> Outcome | None:
    """Return the outcome of a test that ranks skipped; None if no rank skipped it.

    It is a failure if not all of them did.
    """
    skips: dict[int, Phase] = {}
    for rank, of_rank in phases.finished.items():
        for phase in of_rank:
            if phase.outcome == "skipped":
                skips[rank] = phase
    if not skips:
        return None
    if len(skips) == len(phases.finished):
        first = skips[min(skips)]
        return Outcome("skipped", first.message, location=first.location)
    outcomes = []
    for rank in phases.finished:
        if rank in skips:
            reason = skips[rank].message
            outcomes.append(f"rank {rank} skipped ({reason})")
        else:
            outcomes.append(f"rank {rank} passed")
    return Outcome("failed", f"ranks disagree: {'; '.join(outcomes)}")


def _unexpected_pass(phases: _LoggedPhases) -> Outcome | None:
    """Return the outcome of a test that passed on all ranks in spite of a strict xfail mark.

    It is a pass with a text, of which ``finish_report`` makes a failure. That is right even if a
    teardown then fails as expected. None for any other test.
    """
    strict = _strict_passes(phases)
    if strict and len(strict) == len(phases.finished):
        return Outcome("passed", strict[0])
    return None


def _strict_passes(phases: _LoggedPhases) -> list[str]:
    """Return pytest's texts of phases that passed in spite of a strict xfail mark."""
    texts = []
    for of_rank in phases.finished.values():
        for phase in of_rank:
            if phase.text.startswith(STRICT_XPASS):
                texts.append(phase.text)
    return texts


def _properties(phases: _LoggedPhases) -> Properties:
    """Return the properties that the ranks recorded, those of rank 0 first.

    The last phase of a rank has the properties of all its phases.
    """
    last_by_rank = {}
    for rank, of_rank in phases.finished.items():
        if of_rank:
            last_by_rank[rank] = of_rank[-1].properties
    return of_all_ranks(last_by_rank)


def of_all_ranks(
    properties: Mapping[int, Sequence[tuple[str, Any]]],
) -> Properties:
    """Return rank 0's properties, and those of other ranks that differ from them.

    The latter are named after their rank: ``("loss", 0.4), ("loss (rank 1)", 0.5)``.

    Args:
        properties: Each rank to the properties in its last report, which has those of all reports
            before it.
    """
    first = tuple(properties.get(0, ()))
    others = []
    for rank, of_rank in properties.items():
        if rank == 0:
            continue
        for name, value in of_rank:
            if (name, value) not in first:
                others.append((f"{name} (rank {rank})", value))
    return (*first, *others)


def _sections(phases: _LoggedPhases, ending: Ending) -> Sections:
    """Return what all ranks wrote, as (title, content), each once."""
    sections = []
    for rank in phases.finished:
        for phase in phases.of_rank(rank):
            for title, content in phase.sections:
                sections.append((f"{title} (rank {rank})", content))
    # Output past pytest's capture: of C libraries, and of an interpreter that crashes.
    for end in ending.ranks:
        if end.output.strip():
            title = f"{UNCAPTURED} (rank {end.rank})"
            sections.append((title, end.output))
    return tuple(dict.fromkeys(sections))


def count_subtests(ending: Ending, phases: Mapping[int, Phase]) -> Ending:
    """Return the ending in which failed subtests count as failures of their ranks.

    A rank logs a failed subtest, goes on, and may then be stopped because of another rank's xfail.
    Its failure would be lost.

    Args:
        ending: How the ranks ended.
        phases: A rank to the phase that it did not finish, see ``_LoggedPhases.unfinished``.
    """
    ranks = []
    for end in ending.ranks:
        phase = phases.get(end.rank)
        if phase is not None and phase.outcome == "failed":
            ranks.append(_failed_by_subtests(end, phase))
        else:
            ranks.append(end)
    return dataclasses.replace(ending, ranks=tuple(ranks))


def _failed_by_subtests(end: RankEnd, phase: Phase) -> RankEnd:
    """Return how a rank ended that ended in this phase, of which subtests had failed.

    If it ended because of other ranks, its failed subtests are now the reason. Otherwise its own
    reason stays, and the text of the subtests is added.
    """
    ended_by_others = end.status in {"stopped", "lost peer"} and not phase.lost
    if end.status == "done" or ended_by_others:
        message = f"raised failed: {phase.message}"
        return dataclasses.replace(
            end, status="raised", kind="failed", message=message, text=phase.text
        )
    texts = []
    for text in (phase.text, end.text):
        if text:
            texts.append(text)
    return dataclasses.replace(end, text="\n\n".join(texts))
