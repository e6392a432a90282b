"""One outcome from all ranks' phases: never weaker than the worst rank, and disagreement is a failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_distcompat.launch import Ending

#: Captured output beyond this many characters is cut in the middle; the whole is in the life's directory.
SECTION = 65536


class SkipElsewhere:
    """The kind of a rank that ended because it skipped and the others did not."""

    KIND = "skip"


class XFailed:
    """The kind of a rank that ended because it failed as its xfail mark says."""

    KIND = "xfail"


@dataclass(frozen=True)
class Phase:
    """One phase of an item on one rank: ``setup``, ``call`` or ``teardown``."""

    when: str
    outcome: str
    message: str = ""
    text: str = ""
    location: tuple[str, int, str] | None = None
    sections: tuple[tuple[str, str], ...] = ()
    properties: tuple[tuple[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)


def phase_of(report: pytest.TestReport) -> Phase:
    """What a rank's log keeps of a report.

    ``outcome`` is ``passed``, ``failed``, ``skipped`` or ``xfailed``. A strict xpass counts as passed: the parent
    evaluates the same mark on the outcome of all ranks.
    """
    outcome: str = report.outcome
    text = report.longreprtext
    message, location = _last_line(report, text), None
    if hasattr(report, "wasxfail"):
        outcome, message = ("xfailed", str(report.wasxfail)) if report.outcome == "skipped" else ("passed", "")
    elif report.outcome == "failed" and text.startswith("[XPASS(strict)]"):
        outcome = "passed"
    elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        path, line, reason = report.longrepr
        location, message = (str(path), int(line), str(reason)), str(reason).removeprefix("Skipped: ")
    sections = tuple((title, _cut(content)) for title, content in report.sections if report.when == "teardown" or outcome != "passed")
    properties = tuple((name, value) for name, value in report.user_properties if _is_plain(value))
    return Phase(report.when or "", outcome, message, text, location, sections, properties)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float, bool, type(None)))


def _last_line(report: pytest.TestReport, text: str) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).splitlines()[0] if crash.message else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _cut(text: str) -> str:
    if len(text) <= SECTION:
        return text
    half = SECTION // 2
    return f"{text[:half]}\n... {len(text) - SECTION} characters cut ...\n{text[-half:]}"


class RankFailure(Exception):  # noqa: N818 - it stands for a test's failure, and is shown as its text
    """An item failed on a rank; the message is the text to show. ``hard``: no xfail mark may excuse it."""

    def __init__(self, text: str, *, hard: bool) -> None:
        super().__init__(text)
        self.hard = hard


@dataclass(frozen=True)
class Outcome:
    """What the parent reports: ``passed``, ``failed``, ``skipped`` or ``xfailed``."""

    kind: str
    text: str = ""
    hard: bool = False
    location: tuple[str, int, str] | None = None
    sections: tuple[tuple[str, str], ...] = ()
    properties: tuple[tuple[str, Any], ...] = ()


def merge(ending: Ending) -> Outcome:
    """One outcome from all ranks."""
    phases = {rank: [_phase(event) for event in events if event["event"] == "phase"] for rank, events in ending.events.items()}
    shown: dict[str, Any] = {"sections": _sections(phases, ending)}
    shown["properties"] = tuple(p for phase in phases.get(0, []) for p in phase.properties)
    if ending.failed:
        kinds = {end.kind for end in ending.ranks if end.status not in {"done", "lost peer", "stopped"}}
        cause = ending.cause
        if kinds == {XFailed.KIND} and cause is not None and not ending.timed_out:
            return Outcome("xfailed", cause.message.removeprefix("raised xfailed: "), **shown)
        text = ending.text().replace("raised failed", "failed").replace("raised skipped", "skipped")
        return Outcome("failed", text, hard=ending.kind != "raised", **shown)
    skips = {rank: phase for rank, found in phases.items() for phase in found if phase.outcome == "skipped"}
    if len(skips) == len(phases) and skips:
        first = skips[min(skips)]
        return Outcome("skipped", first.message, location=first.location, **shown)
    if skips:
        said = "; ".join(f"rank {rank} {f'skipped ({skips[rank].message})' if rank in skips else 'passed'}" for rank in phases)
        return Outcome("failed", f"ranks disagree: {said}", **shown)
    silent = [str(rank) for rank, found in phases.items() if not any(phase.when == "teardown" for phase in found)]
    if silent:
        return Outcome("failed", f"rank {', '.join(silent)} ended without running the test to its end", hard=True, **shown)
    return Outcome("passed", **shown)


def _phase(event: Mapping[str, Any]) -> Phase:
    known = {field.name: event[field.name] for field in dataclasses.fields(Phase) if field.name in event}
    location = tuple(known["location"]) if known.get("location") else None
    pairs = {name: tuple((a, b) for a, b in known[name]) for name in ("sections", "properties")}
    return Phase(**{**known, "location": location, **pairs})


def _sections(phases: Mapping[int, list[Phase]], ending: Ending) -> tuple[tuple[str, str], ...]:
    found = [
        (f"{title} (rank {rank})", content) for rank, all_phases in phases.items() for phase in all_phases for title, content in phase.sections
    ]
    # What went past pytest's capture: the C library's and a dying interpreter's words.
    found += [(f"Uncaptured output (rank {end.rank})", end.output) for end in ending.ranks if end.output.strip()]
    return tuple(dict.fromkeys(found))
