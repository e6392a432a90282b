"""Judge: one verdict from a check, a trace and the expectations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS, Check
from pytest_distcompat.checks._base import message
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.expect import Expectation, fails, may_refuse, refuses
from pytest_distcompat.scenario import OTHER_REFERENCE
from pytest_distcompat.settings.rules import contradiction, meant_to_fail
from pytest_distcompat.status import Status, Verdict
from pytest_distcompat.trace import RunFailure, Trace

#: Why a claim that holds in a simulation has not passed.
NO_VALUES = "simulated: no values were computed"
#: What differs between failures of one cause, and what a regular expression would have to escape.
_VARIABLE = re.compile(r"[^\w\s,;:'\"/=<>-]+|\branks? \d+|\b\d\w*")
#: Exceptions that are not raised on purpose.
_ACCIDENTS = "AttributeError|KeyError|IndexError|NameError|UnboundLocalError|ZeroDivisionError|RecursionError"
#: The error of a driver's method that nobody has written yet: a TODO of ``distcompat init``, or one that is missing.
_UNWRITTEN = re.compile(r"NotImplementedError: (TODO: |\w+ has no \w+\(\); a driver needs )")
#: The longest ``match`` of a declaration to paste, in characters.
_LONGEST_MATCH = 240
#: The actions in which a trainer is to refuse what it does not support.
_BUILDS = frozenset({"build_model", "build"})


def skipped(check: str, cell: Cell, reason: str) -> Verdict:
    """Return the verdict of a cell that was not run."""
    return Verdict(check, cell.id, Status.SKIPPED, reason, reason)


def judge(check: Check, cell: Cell, trace: Trace, expectations: Iterable[Expectation] = ()) -> Verdict:
    """Return the verdict of a check in a cell. A crash or a hang is never a known failure.

    A failure that an expectation no longer excuses, since its last day is over, says so. A simulation never passes.
    """
    if trace.simulated:
        # A bug may show only in values.
        expectations = [replace(one, strict=False) for one in expectations]
    verdict = _judge(check, cell, trace, expectations)
    if trace.simulated and verdict.status is Status.PASSED:
        return replace(verdict, status=Status.SIMULATED, reason=NO_VALUES)
    return verdict


def _judge(check: Check, cell: Cell, trace: Trace, expectations: Iterable[Expectation]) -> Verdict:
    covering = [expectation for expectation in expectations if expectation.covers(cell, check.name)]
    if over := [one for one in covering if one.ended]:
        verdict = _judge(check, cell, trace, [one for one in covering if one not in over])
        excused = next((one for one in over if one.matches(verdict.message)), None)
        if excused and verdict.status is Status.FAILED:
            ended = f"the quarantine ended on {excused.until}: {excused}"
            return replace(verdict, message=f"{verdict.message}\n\n{ended}")
        return verdict
    end = _broken_off(check, trace)
    if end is not None and end.kind != "raised":
        return Verdict(check.name, cell.id, Status(end.kind), end.text)
    failure = end or next((run.end for run in trace if run.end is not None), None)
    if cell.set:
        # A swept setting is accepted or refused, and may mend what is known to fail without it.
        covering = [*(replace(one, strict=False) for one in covering), *_refused_setting(failure)]
    if refusal := _expected_refusal(covering, failure):
        return _refusal(check, cell, trace, refusal, failure)
    if end is not None:
        found = [end.text or end.message or "broke off without a word"]
    else:
        found = _findings(check, cell, trace)
    text, failures = "\n".join(found), [one for one in covering if one.kind == "fails"]
    # An issue that names no check covers this failure only if its message matches.
    if declared := [one for one in failures if one.strict or one.check != "*" or one.matches(text)]:
        return _known(check, cell, declared, found, whole=end is None)
    return Verdict(check.name, cell.id, Status.FAILED if found else Status.PASSED, message(found))


def declaration(check: Check, cell: Cell, trace: Trace) -> Expectation | None:
    """Return the expectation that would declare this failure; None where none can, as for a crash or a hang.

    A method that is not written yet is none: once declared, a suite would pass without a run.
    """
    end = _broken_off(check, trace)
    if end is not None and _UNWRITTEN.search(end.message):
        return None
    facets: dict[str, Any] = {"strategy": cell.strategy, "precision": cell.precision, **dict(cell.options)}
    found = [_without_rank(end) or end.text] if end else _findings(check, cell, trace)
    if end is not None and end.action in _BUILDS:
        made = refuses(match=_constant_part(found[0]) or ".", **facets)
    else:
        match = "|".join(dict.fromkeys(map(_constant_part, found)))
        made = fails(check.name, reason="a link to the issue", match=match, **facets)
    declared = judge(check, cell, trace, [made]).status in {Status.KNOWN, Status.REFUSED}
    return made if declared and len(made.match) <= _LONGEST_MATCH else None


def _constant_part(finding: str) -> str:
    """Return the longest part of a finding's first line that has no numbers and nothing to escape."""
    return max(_VARIABLE.split(finding.strip().partition("\n")[0]), key=len).strip(" ,;:")


def _broken_off(check: Check, trace: Trace) -> RunFailure | None:
    """Return the failure of a run that ended before the snapshots that the check needs, None if there is none."""
    for run in trace:
        if (end := run.end) is None:
            continue
        needed = [run.at(action, nth) for name, action, nth in check.until if name == run.name]
        broken = end.index < 0 or any(not reached or end.index <= reached[0].index for reached in needed)
        if (run.name in check.raises and end.kind != "raised") or (needed and broken):
            return end
    return None


def _findings(check: Check, cell: Cell, trace: Trace) -> list[str]:
    """Return what the check finds; if nothing, whether it and another check hold with one setting each of two."""
    return check.findings(cell, trace) or [*_mixed(check, cell, trace)]


def _mixed(check: Check, cell: Cell, trace: Trace) -> Iterator[str]:
    """Yield a finding where the claim holds against one of two contradictory settings alone, and another against the other."""
    settings = contradiction(cell.set)
    if not settings or OTHER_REFERENCE not in trace.runs:
        return
    own, driver = check.agrees_with(cell, trace), find_driver(trace.driver)
    meant = {name for setting in cell.set for name in meant_to_fail(setting)}
    for other in CHECKS.by_name.values():
        compared = not other.not_applicable(cell, driver) and other.runs(cell, driver) == check.runs(cell, driver)
        if other.name in meant or not compared or _broken_off(other, trace):
            continue
        # A claim that holds against neither is a finding of its own.
        theirs = other.agrees_with(cell, trace)
        if len(own) == len(theirs) == 1 and own != theirs:
            yield (
                f"a mix of two settings that contradict each other: {check.name} holds with {settings[own[0]]} alone, "
                f"{other.name} with {settings[theirs[0]]} alone; expected one of them everywhere"
            )


def _expected_refusal(covering: Iterable[Expectation], end: RunFailure | None) -> Expectation | None:
    """Return the declared refusal that matches the failure, else one that must occur, else None."""
    refusals = [one for one in covering if one.kind == "refuses"]
    strict = (one for one in refusals if one.strict)
    return next((one for one in refusals if _refused(one, end)), next(strict, None))


def _refused_setting(end: RunFailure | None) -> list[Expectation]:
    """Return a refusal for a run that ended before its first step with an error that speaks of the setting.

    Errors of Python itself in a library's code (``AttributeError``) speak of nothing that a user has set.
    """
    early = end is not None and end.action in _BUILDS
    return [may_refuse(match=rf"raised (?!{_ACCIDENTS})[\w.]+: \S")] if early else []


def _refused(refusal: Expectation, end: RunFailure | None) -> bool:
    return end is not None and end.kind == "raised" and refusal.matches(f"{end.message}\n{end.text}")


def _refusal(check: Check, cell: Cell, trace: Trace, refusal: Expectation, end: RunFailure | None) -> Verdict:
    declared, status, reason = f"declared: {refusal}", Status.FAILED, refusal.reason
    if end is None:
        wanted = f"expected to be refused at build with a message like {refusal.match!r}"
        text = f"{wanted}, but it ran to the end\n{declared}"
    elif end.kind != "raised":
        status, text = Status(end.kind), end.text
    elif not _refused(refusal, end):
        text = f"{end.text}\n\nrefused with another message than {refusal.match!r}\n{declared}"
    elif end.action not in _BUILDS:
        text = f"refused only at {end.action!r}, after build; expected at build\n{declared}\n\n{end.text}"
        status = Status.LATE
    elif built := sorted(snapshot.rank for run in trace if run.end == end for snapshot in run.at("build")):
        ranks = f"rank{'s' * (len(built) > 1)} {', '.join(map(str, built))}"
        text = f"refused on some ranks only; built on {ranks}\n{declared}\n\n{end.text}"
    else:
        status, text, reason = Status.REFUSED, end.message, refusal.reason or _without_rank(end) or end.message
    return Verdict(check.name, cell.id, status, text, reason)


def _without_rank(end: RunFailure) -> str:
    """Return the exception that a run ended with: it is chance which rank raises first."""
    return end.message.partition(" raised ")[2]


def _known(check: Check, cell: Cell, declared: list[Expectation], found: list[str], *, whole: bool) -> Verdict:
    """Return the verdict where bugs are declared. ``whole``: the run ended well, so ``found`` has all findings."""
    text = "\n".join(found)  # all findings, also those that the message cuts
    # Of several bugs declared for the check, those whose message matches.
    shown = [one for one in declared if found and any(map(one.matches, (text, *found)))]
    missing = [one for one in declared if one.strict and one not in shown]
    gone = f"fixed? Then remove {' and '.join(map(str, missing))}"
    if not found and not missing:
        return Verdict(check.name, cell.id, Status.PASSED)
    if not found:
        return Verdict(check.name, cell.id, Status.FIXED, f"declared to fail, but it passes: {gone}", missing[0].reason)
    known = (shown or declared)[0]
    if not shown:
        text = f"{message(found)}\n\nfails otherwise than declared: {known}"
        return Verdict(check.name, cell.id, Status.FAILED, text, known.reason)
    # Each finding must be declared: a known bug must not hide another one.
    others = [one for one in found if whole and not any(each.explains(one) for each in declared)]
    if others:
        text = f"{message(others)}\n\nfails as declared too: {known}"
        return Verdict(check.name, cell.id, Status.FAILED, text, known.reason)
    if missing and whole:
        text = f"fails as declared ({known}), and not as declared besides: {gone}\n\n{message(found)}"
        return Verdict(check.name, cell.id, Status.FIXED, text, missing[0].reason)
    reasons = tuple(dict.fromkeys(one.reason for one in shown))
    return Verdict(check.name, cell.id, Status.KNOWN, message(found), "; and ".join(reasons), reasons)
