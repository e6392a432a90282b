"""Check, trace and expectations together: one verdict a cell and check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import Check
from pytest_distcompat.checks._base import message
from pytest_distcompat.expect import Expectation
from pytest_distcompat.trace import RunFailure, RunTrace, Trace

#: The verdicts that are a success.
GOOD = frozenset({"passed", "refused"})


@dataclass(frozen=True)
class Verdict:
    """What came out, and why.

    ``status``: ``passed``; ``failed``; ``known`` (fails, as declared); ``fixed?`` (declared to fail, and does not);
    ``refused`` (as declared, at build); ``late`` (refused, but after build); ``crashed``; ``hung``; ``leaked``; ``skipped``.
    ``reasons`` are those of all the bugs by which it is known, of which ``reason`` tells.
    """

    check: str
    cell: str
    status: str
    message: str = ""
    reason: str = ""
    reasons: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it is a success, known failures not counted."""
        return self.status in GOOD


def skipped(check: str, cell: Cell, reason: str) -> Verdict:
    """The verdict of a cell that was not run: it says why."""
    return Verdict(check, cell.id, "skipped", reason, reason)


def judge(check: Check, cell: Cell, trace: Trace, expectations: Iterable[Expectation] = ()) -> Verdict:
    """One verdict. Never better than what the ranks did: a crash or a hang is no known failure, whatever is declared."""
    covering = [expectation for expectation in expectations if expectation.covers(cell, check.name)]
    end = _broken_off(check, trace)
    if end is not None and end.kind != "raised":
        return Verdict(check.name, cell.id, end.kind, end.text)
    whose = end or _any_end(trace)
    if refusal := _expected_refusal(covering, whose):
        return _refusal(check, cell, trace, refusal, whose)
    if end is not None:
        found = [end.text or end.message or "broke off without a word"]
    else:
        found = check.findings(cell, trace)
    text = "\n".join(found)
    # What is declared of no place in particular is about this failure only if it reads like it.
    declared = [
        one for one in covering if one.kind == "fails" and (one.strict or one.check != "*" or one.matches(text))
    ]
    if declared:
        return _known(check, cell, declared, found, whole=end is None)
    return Verdict(check.name, cell.id, "failed" if found else "passed", message(found))


def _broken_off(check: Check, trace: Trace) -> RunFailure | None:
    """How the evidence that the check needs was cut short, if it was."""
    for run in trace:
        if run.end is None:
            continue
        if run.name in check.raises and run.end.kind != "raised":
            return run.end
        places = [_place(run, action, nth) for name, action, nth in check.until if name == run.name]
        if places and (run.end.index < 0 or any(place < 0 or run.end.index <= place for place in places)):
            return run.end
    return None


def _place(run: RunTrace, action: str, nth: int) -> int:
    """The index of the nth such action in the run; -1 if no rank got there."""
    snapshots = run.at(action, nth)
    return snapshots[0].index if snapshots else -1


def _any_end(trace: Trace) -> RunFailure | None:
    return next((run.end for run in trace if run.end is not None), None)


def _expected_refusal(covering: Iterable[Expectation], end: RunFailure | None) -> Expectation | None:
    """Of several things that are not supported whoever looks first refuses one; without any such, one that must be refused."""
    refusals = [one for one in covering if one.kind == "refuses"]
    strict = (one for one in refusals if one.strict)
    return next((one for one in refusals if _refused(one, end)), next(strict, None))


def _refused(refusal: Expectation, end: RunFailure | None) -> bool:
    return end is not None and end.kind == "raised" and refusal.matches(f"{end.message}\n{end.text}")


def _refusal(check: Check, cell: Cell, trace: Trace, refusal: Expectation, end: RunFailure | None) -> Verdict:
    said = f"declared: {refusal}"
    if end is None:
        text = f"expected to be refused at build with a message like {refusal.match!r}, but it ran to the end\n{said}"
        return Verdict(check.name, cell.id, "failed", text, refusal.reason)
    if end.kind != "raised":
        return Verdict(check.name, cell.id, end.kind, end.text, refusal.reason)
    if not refusal.matches(end.message + "\n" + end.text):
        text = f"refused with another message than {refusal.match!r}\n{said}\n\n{end.text}"
        return Verdict(check.name, cell.id, "failed", text, refusal.reason)
    if end.action not in {"build_model", "build"}:
        text = f"refused only at {end.action!r}, after build; expected at build\n{said}\n\n{end.text}"
        return Verdict(check.name, cell.id, "late", text, refusal.reason)
    built = sorted(snapshot.rank for run in trace if run.end == end for snapshot in run.at("build"))
    if built:
        ranks = ", ".join(map(str, built))
        text = f"refused on some ranks only; built on rank{'s' * (len(built) > 1)} {ranks}\n{said}\n\n{end.text}"
        return Verdict(check.name, cell.id, "failed", text, refusal.reason)
    # Without the rank: which of them was first to refuse is chance.
    said = end.message.partition(" raised ")[2] or end.message
    return Verdict(check.name, cell.id, "refused", end.message, refusal.reason or said)


def _known(check: Check, cell: Cell, declared: list[Expectation], found: list[str], *, whole: bool) -> Verdict:
    """What is found where bugs are declared. Not ``whole``: of a run that broke off only why it did is known."""
    text = "\n".join(found)  # all of it, not only what a message shows of it
    # Of several bugs that show in one place, the one that reads like this.
    shown = [one for one in declared if found and one.matches(text)]
    missing = [one for one in declared if one.strict and one not in shown]
    gone = f"fixed? Then remove {' and '.join(map(str, missing))}"
    if not found and not missing:
        return Verdict(check.name, cell.id, "passed")
    if not found:
        return Verdict(check.name, cell.id, "fixed?", f"declared to fail, but it passes: {gone}", missing[0].reason)
    known = (shown or declared)[0]
    if not shown:
        told = f"fails otherwise than declared ({known})\n\n{message(found)}"
        return Verdict(check.name, cell.id, "failed", told, known.reason)
    # Each must be declared: a known bug must not hide another one.
    others = [one for one in found if whole and not any(each.explains(one) for each in declared)]
    if others:
        told = f"fails as declared, and otherwise too ({known})\n\n{message(others)}"
        return Verdict(check.name, cell.id, "failed", told, known.reason)
    if missing and whole:
        told = f"fails as declared ({known}), and not as declared besides: {gone}\n\n{message(found)}"
        return Verdict(check.name, cell.id, "fixed?", told, missing[0].reason)
    reasons = tuple(dict.fromkeys(one.reason for one in shown))
    return Verdict(check.name, cell.id, "known", message(found), "; and ".join(reasons), reasons)
