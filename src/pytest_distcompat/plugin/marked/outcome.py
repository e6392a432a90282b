"""One outcome from all ranks' phases: never weaker than the worst rank, and disagreement is a failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.excerpt import excerpt, explained
from pytest_distcompat.plugin.marked.phase import Phase, SkipElsewhere, XFailed, fields_of
from pytest_distcompat.plugin.marked.subtests import broken_off, name_of, weighed, with_subtests

if TYPE_CHECKING:
    from pytest_distcompat.launch import Ending

#: Captured output beyond this many characters is cut in the middle; the whole is in the run's directory.
SECTION = 65536

#: The same for an exception's text and for a property: they travel to pytest's process, and stay there.
LARGEST = 2**20

#: How much of an exception's first line stands in a headline.
HEADLINE = 500

#: The title of what a rank wrote past pytest's capture.
UNCAPTURED = "Uncaptured output"

#: The property of a failed test that says which rank was the cause.
RANK = "distcompat_rank"

#: The attribute of a rank's report that failed only because another rank is gone.
LOST = "distcompat_lost_peer"

#: How pytest begins the text of a test that passed although a strict xfail mark says otherwise.
STRICT_XPASS = "[XPASS(strict)]"


def mark_lost_peer(report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
    """Keep with a rank's report whether its exception, of which only the text goes on from here, tells of a lost peer."""
    from pytest_distcompat.launch.peers import lost_peer

    if call.excinfo is not None and lost_peer(call.excinfo.value):
        setattr(report, LOST, True)


class Phases:
    """Makes the phases of an item from its reports, in turn; its subtests count in the phase that they ran in."""

    def __init__(self) -> None:
        self._ran: list[Phase] = []

    def of(self, report: pytest.TestReport) -> Phase:
        """The report as a phase, or as the subtest of one that is not over."""
        phase = phase_of(report, self._ran)
        if phase.subtest:
            self._ran.append(phase)
        else:
            self._ran = []
        return phase


def phase_of(report: pytest.TestReport, ran: Sequence[Phase] = ()) -> Phase:
    """What a rank's log keeps of a report. ``ran`` are the subtests in that phase.

    ``outcome`` is ``passed``, ``failed``, ``skipped`` or ``xfailed``. A strict xpass counts as passed, with its text: the
    parent decides on the outcome of all ranks.
    """
    outcome: str = report.outcome
    text = report.longreprtext
    message, location = _last_line(report, text), None
    if hasattr(report, "wasxfail"):
        outcome, message = ("xfailed", str(report.wasxfail)) if report.outcome == "skipped" else ("passed", "")
    elif report.outcome == "failed" and text.startswith(STRICT_XPASS):
        outcome = "passed"
    elif report.outcome == "failed":
        location = _place(report, message)
    elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        path, line, reason = report.longrepr
        location, message = (str(path), int(line), str(reason)), str(reason).removeprefix("Skipped: ")
        text = f"{path}:{line}: {reason}"
    subtest, lost = name_of(report), outcome == "failed" and getattr(report, LOST, False)
    failed = not subtest and any(one.outcome == "failed" for one in ran)
    sections = tuple(
        (title, excerpt(content, SECTION))
        for title, content in report.sections
        if report.when == "teardown" or outcome != "passed" or failed
    )
    if subtest:
        text = excerpt(text, LARGEST)
        return Phase(str(report.when), outcome, message, text, location, sections, subtest=subtest, lost=lost)
    properties = tuple((name, _travelling(value)) for name, value in report.user_properties)
    phase = Phase(str(report.when), outcome, message, text, location, sections, properties, lost=lost)
    phase = with_subtests(phase, ran)
    return dataclasses.replace(phase, text=excerpt(phase.text, LARGEST))


def _is_builtin(value: Any) -> bool:
    return isinstance(value, (str, int, float, bool, type(None)))


def _travelling(value: Any) -> Any:
    """Return a property as it travels: of any other object its text, which is all that JUnit's file has of it.

    https://docs.pytest.org/en/stable/how-to/output.html#record-property
    """
    if not _is_builtin(value):
        try:
            value = str(value)
        except Exception as error:
            value = f"{type(value).__name__}, whose text cannot be made: {type(error).__name__}"
    return excerpt(value, LARGEST) if isinstance(value, str) else value


def _place(report: pytest.TestReport, message: str) -> tuple[str, int, str] | None:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (str(crash.path), int(crash.lineno), message) if crash is not None else None


def _last_line(report: pytest.TestReport, text: str) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return explained(str(crash.message).splitlines()[0][:HEADLINE]) if crash.message else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # What has no crash location (an unknown fixture) still marks its error as pytest does.
    marked = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
    return (marked[:1] or lines[-1:] or [""])[0]


class RankFailure(Exception):
    """An item failed on a rank; the message is the text to show. ``hard``: no xfail mark may excuse it."""

    def __init__(self, text: str, *, hard: bool) -> None:
        super().__init__(text)
        self.hard = hard


@dataclass(frozen=True)
class Outcome:
    """What the parent reports: ``passed``, ``failed``, ``skipped`` or ``xfailed``.

    ``passed`` with a text is a strict xfail mark that a rank added to its item, and that did not come true.
    """

    kind: str
    text: str = ""
    hard: bool = False
    location: tuple[str, int, str] | None = None
    sections: tuple[tuple[str, str], ...] = ()
    properties: tuple[tuple[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """What ``to_json`` gave."""
        return cls(**fields_of(cls, data))


def merge(ending: Ending) -> Outcome:
    """One outcome from all ranks."""
    told = {
        rank: [Phase.from_json(event) for event in events if event["event"] in {"phase", "subtest"}]
        for rank, events in ending.events.items()
    }
    phases = {rank: [phase for phase in found if not phase.subtest] for rank, found in told.items()}
    unended = {rank: phase for rank, found in told.items() if (phase := broken_off(found)) is not None}
    ending = weighed(ending, unended)
    seen = {rank: [*found, *([unended[rank]] if rank in unended else [])] for rank, found in phases.items()}
    shown: dict[str, Any] = {"sections": _sections(seen, ending)}
    shown["properties"] = of_all_ranks({rank: found[-1].properties for rank, found in phases.items() if found})
    if ending.failed:
        kinds = {end.kind for end in ending.ranks if end.status not in {"done", "lost peer", "stopped"}}
        expected = [end for end in (ending.cause, *ending.ranks) if end is not None and end.kind == XFailed.KIND]
        if expected and kinds <= {XFailed.KIND, SkipElsewhere.KIND} and ending.kind == "raised":
            return Outcome("xfailed", expected[0].message.removeprefix("raised xfailed: "), **shown)
        ending = _excused_last(ending)
        if ending.cause is not None and not ending.launch_error:
            shown["properties"] += ((RANK, ending.cause.rank),)
        text = (
            ending.text()
            .replace("raised failed", "failed")
            .replace("raised skipped", "skipped")
            .replace("raised xfailed", "xfailed")
        )
        if ending.cause is not None:
            failed = (phase.location for phase in seen[ending.cause.rank] if phase.outcome == "failed")
            shown["location"] = next(failed, None)
        return Outcome("failed", text, hard=_crashed(ending), **shown)
    skips = {rank: phase for rank, found in phases.items() for phase in found if phase.outcome == "skipped"}
    if len(skips) == len(phases) and skips:
        first = skips[min(skips)]
        return Outcome("skipped", first.message, location=first.location, **shown)
    if skips:
        said = "; ".join(
            f"rank {rank} {f'skipped ({skips[rank].message})' if rank in skips else 'passed'}" for rank in phases
        )
        return Outcome("failed", f"ranks disagree: {said}", **shown)
    xfails = [phase for found in phases.values() for phase in found if phase.outcome == "xfailed"]
    if xfails:
        return Outcome("xfailed", xfails[0].message, **shown)
    silent = [str(rank) for rank, found in phases.items() if not any(phase.when == "teardown" for phase in found)]
    if silent:
        return Outcome(
            "failed", f"rank {', '.join(silent)} ended without running the test to its end", hard=True, **shown
        )
    unexpected = (phase.text for found in phases.values() for phase in found if phase.text.startswith(STRICT_XPASS))
    return Outcome("passed", next(unexpected, ""), **shown)


def of_all_ranks(properties: Mapping[int, Sequence[tuple[str, Any]]]) -> tuple[tuple[str, Any], ...]:
    """Return rank 0's properties, and with its number in their names those of any other rank that are not the same there.

    Of each rank they are those of its last report, which has all so far.
    """
    first = tuple(properties.get(0, ()))
    others = (
        (f"{name} (rank {rank})", value)
        for rank, found in properties.items()
        for name, value in found
        if rank and (name, value) not in first
    )
    return (*first, *others)


def _excused_last(ending: Ending) -> Ending:
    """The ranks that ended by a skip or an xfail of their own behind those that really failed or hung, whoever was first."""
    excused = {XFailed.KIND, SkipElsewhere.KIND}
    ranks = (dataclasses.replace(end, status="excused") if end.kind in excused else end for end in ending.ranks)
    return dataclasses.replace(ending, ranks=tuple(ranks))


def _crashed(ending: Ending) -> bool:
    """Whether more happened than an exception, on any rank, even if another one raised before it."""
    return ending.kind != "raised" or any(end.status == "stuck" for end in ending.ranks)


def _sections(phases: Mapping[int, list[Phase]], ending: Ending) -> tuple[tuple[str, str], ...]:
    found = [
        (f"{title} (rank {rank})", content)
        for rank, all_phases in phases.items()
        for phase in all_phases
        for title, content in phase.sections
    ]
    # What went past pytest's capture: the C library's and a dying interpreter's words.
    found += [(f"{UNCAPTURED} (rank {end.rank})", end.output) for end in ending.ranks if end.output.strip()]
    return tuple(dict.fromkeys(found))


def disagreement(warm: str, cold: str, text: str) -> str:
    """Return what is said of a test or check that came to another verdict the second time."""
    return f"warm ranks and torchrun's disagree: {warm} on warm ranks, {cold} under torchrun\n\n{text}".rstrip()


def unexcused(report: pytest.TestReport) -> None:
    """Make it a failure, whatever an xfail mark says: a crash, a hang or a leak is no expected one."""
    report.outcome = "failed"
    if hasattr(report, "wasxfail"):
        del report.wasxfail
