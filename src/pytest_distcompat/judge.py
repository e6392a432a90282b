"""Judge: make one verdict of a check, the trace of its runs, and what is declared to fail.

``judge`` is called by ``engine.run_check`` (for an item of a ``CompatSuite`` and for
``check_driver``), and by ``ext.scripts.result`` (for a script), after the runs have ended. It gets

- the check, a claim such as ``resume``, which yields findings: one sentence for each thing wrong;
- the cell: one point of the test matrix, such as ``fsdp2-bf16_upcast-w2``;
- the trace: what each rank recorded in each run (a process group from start to end), and how a
  run failed, if it did: the ``RunFailure`` has its ``kind`` (``raised``, ``crashed`` or ``hung``),
  one line as ``message`` (``rank 1 raised ValueError: no such layer``), and all that is known,
  such as tracebacks, as ``text``;
- the expectations: what users and known issues declare by ``fails(...)`` (a known bug) or
  ``refuses(...)`` (the trainer does not support the cell and must say so at build).

It returns a ``Verdict``. For the example of ``fails("resume", strategy="fsdp2", match="exp_avg")``:

- the check yields ``rank 0: exp_avg is another``: known;
- it yields nothing: ``fixed?``, which is red, because the declaration must be removed;
- it yields something without ``exp_avg``: failed;
- a rank crashes before the check's last snapshot: crashed, whatever is declared.

An expectation that is not ``strict`` (``may_fail(...)``) need not occur. It *matches* a text in
which its regular expression ``match`` is found. It *explains* a finding that it matches, or in
which its ``also`` is found. It has *ended* once the last day for which it was declared is over
(``until``).

An extension may judge some cells in another way: their ``law`` may change which expectations count
and which findings there are. The law of most cells changes neither.

``declaration`` goes the other way: it returns the declaration that would cover a failure, which the
failure's text offers to paste.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import Check, all_check_names, find_check, message
from pytest_distcompat.expect import Expectation, fails, refuses
from pytest_distcompat.law import law_of
from pytest_distcompat.status import Status, Verdict
from pytest_distcompat.trace import RunFailure, Snapshot, Trace
from pytest_distcompat.wording import listed_ranks

#: Parts of a finding that ``declaration`` leaves out of ``match``: numbers and ranks, which differ
#: between failures of one cause, and characters that a regular expression would have to escape.
_VARIABLE = re.compile(r"[^\w\s,;:'\"/=<>-]+|\branks? \d+|\b\d\w*")
#: Exceptions that a trainer does not raise on purpose, as a regular expression. An error of these
#: types is a bug of the trainer, not its way to say that it does not support a cell. The judge does
#: not read it: ``ext.upstream.sweep.law`` and ``ext.search.trial`` do.
ACCIDENTS = (
    "AttributeError|KeyError|IndexError|NameError|UnboundLocalError|ZeroDivisionError|"
    "RecursionError"
)
#: The error of a driver's method that nobody has written yet. ``distcompat init`` writes methods
#: that raise the first one; the base class of drivers raises the second one.
_UNWRITTEN = re.compile(r"NotImplementedError: (TODO: |\w+ has no \w+\(\); a driver needs )")
#: The longest ``match`` of a declaration that is offered to paste, in characters.
_LONGEST_MATCH = 240
#: The actions (steps of a rank's work) in which a trainer must refuse what it does not support.
BUILDS = frozenset({"build_model", "build"})


def skipped(check: str, cell: Cell, reason: str) -> Verdict:
    """Return the verdict of a cell that was not run."""
    return Verdict(check, cell.id, Status.SKIPPED, reason, reason)


def judge(
    check: Check, cell: Cell, trace: Trace, expectations: Iterable[Expectation] = ()
) -> Verdict:
    """Return the verdict of a check in a cell. A crash or a hang is never a known failure.

    A failure that an expectation no longer excuses, since its last day is over, says so.

    A stand-in is one process that an extension ran in place of ranks (``--distcompat-simulate``).
    It shows less than real ranks. So a claim that holds there does not pass: it has the status that
    the stand-in names.
    """
    # Real ranks ran.
    if trace.stand_in is None:
        return _judge(check, cell, trace, expectations)
    # A bug may show only in values, which a stand-in does not have. So a declared bug that does not
    # show is no error.
    lenient = [replace(expectation, strict=False) for expectation in expectations]
    verdict = _judge(check, cell, trace, lenient)
    if verdict.status is not Status.PASSED:
        return verdict
    status = Status.from_name(trace.stand_in.status)
    return replace(verdict, status=status, reason=status.reason)


def _judge(check: Check, cell: Cell, trace: Trace, expectations: Iterable[Expectation]) -> Verdict:
    """Return the verdict of a check in a cell, whatever performed the runs.

    In this order: a crash or a hang; a declared refusal; an error that only a declaration for
    another check is about; declared bugs; and what nothing declares.
    """
    expectations = list(expectations)
    covering = [expectation for expectation in expectations if expectation.covers(cell, check.name)]
    ended = [expectation for expectation in covering if expectation.ended]
    if ended:
        # Judge without them. If the check fails, the verdict names the one that excused it before.
        current = [expectation for expectation in expectations if expectation not in ended]
        verdict = _judge(check, cell, trace, current)
        return _with_ended_excuse(verdict, ended)
    broken_off = premature_end(check, trace)
    # ``kind`` is ``raised``, or ``crashed`` or ``hung``: no declaration covers those two.
    if broken_off is not None and broken_off.kind != "raised":
        return Verdict(check.name, cell.id, Status.from_name(broken_off.kind), broken_off.text)
    # A run may also have failed after what this check needs. A declared refusal is about that too.
    failure = broken_off or _first_failure(trace)
    law = law_of(cell)
    covering = law.expectations(covering, failure)
    refusal = _expected_refusal(covering, failure)
    # Where no run builds a trainer, as in those that read loaders, nothing can be refused at build.
    if refusal is not None and (failure is not None or _builds(trace)):
        return _refusal(check, cell, trace, refusal, failure)
    if broken_off is not None:
        # The check lacks snapshots, so the error of the run takes the place of its findings.
        findings = [broken_off.text or broken_off.message or "broke off without a word"]
    else:
        findings = law.findings(check, cell, trace)
    declared = _declared_failures(covering, findings)
    # The error ended the run before this check, but it may be declared for a check that needs the
    # same run: then it is known here too.
    if broken_off is not None and not _occurred(declared, findings):
        same_error = []
        for expectation in _of_other_checks(check, cell, expectations):
            if _declares_error(expectation, broken_off, trace):
                same_error.append(expectation)
        if same_error:
            return _known_as(check, cell, same_error, findings)
    if declared:
        return _known(check, cell, declared, findings, complete=broken_off is None)
    return _undeclared(check, cell, trace, findings)


def _undeclared(check: Check, cell: Cell, trace: Trace, findings: list[str]) -> Verdict:
    """Return the verdict where nothing is declared.

    The message has the first findings, one a line, and how many more there are.
    """
    if findings:
        return Verdict(check.name, cell.id, Status.FAILED, message(findings))
    # What reports say beside the claim that holds; usually empty.
    return Verdict(check.name, cell.id, Status.PASSED, reason=check.remark(cell, trace))


def _with_ended_excuse(verdict: Verdict, ended: Iterable[Expectation]) -> Verdict:
    """Return the verdict; a failure that a declaration excused until its last day says so."""
    if verdict.status is not Status.FAILED:
        return verdict
    for expectation in ended:
        if expectation.matches(verdict.message):
            excuse = f"the quarantine ended on {expectation.until}: {expectation}"
            return replace(verdict, message=f"{verdict.message}\n\n{excuse}")
    return verdict


def _first_failure(trace: Trace) -> RunFailure | None:
    """Return the failure of the first run that failed; None if all ran to their end."""
    for run in trace:
        if run.end is not None:
            return run.end
    return None


def _declared_failures(covering: Iterable[Expectation], findings: list[str]) -> list[Expectation]:
    """Return the declared bugs that concern these findings.

    They are those that must show in this cell (strict), and those that may.

    Args:
        covering: The expectations that cover the check and the cell.
        findings: What the check found, or the error of the run; empty if all is right.
    """
    text = "\n".join(findings)
    declared: list[Expectation] = []
    for expectation in covering:
        if expectation.kind != "fails":
            continue
        # A bug that may show (``may_fail``) in any check (``*``) says nothing of this one, unless
        # its text matches.
        names_the_check = expectation.check != "*"
        if expectation.strict or names_the_check or expectation.matches(text):
            declared.append(expectation)
    return declared


def _of_other_checks(
    check: Check, cell: Cell, expectations: Iterable[Expectation]
) -> list[Expectation]:
    """Return the known bugs of other checks of the cell that are still excused."""
    of_others: list[Expectation] = []
    for expectation in expectations:
        if expectation.kind != "fails" or expectation.check in ("*", check.name):
            continue
        if expectation.ended:
            continue
        if expectation.covers(cell, expectation.check):
            of_others.append(expectation)
    return of_others


def _declares_error(expectation: Expectation, failure: RunFailure, trace: Trace) -> bool:
    """Tell whether the known bug of another check is the error that a run ended with.

    It is if its ``match`` is found in the error's type and first line. A bug that names no error is
    so if this error ended a run of that check, too.
    """
    error = _error_line(failure)
    if expectation.match:
        return expectation.matches(error)
    if expectation.check not in all_check_names():
        return False
    other_failure = premature_end(find_check(expectation.check), trace)
    if other_failure is None or other_failure.kind != "raised":
        return False
    return _error_line(other_failure) == error


def _error_line(failure: RunFailure) -> str:
    """Return type and first line of the exception that a run ended with."""
    line, _, _ = (_without_rank(failure) or failure.message).partition("\n")
    return line


def declaration(check: Check, cell: Cell, trace: Trace) -> Expectation | None:
    """Return the expectation that would declare this failure; None if none can.

    An example is ``fails("resume", strategy="fsdp2", match="other than saved", ...)``. None can
    declare a crash or a hang. None is offered for a driver's method that is not written yet: with
    it, a suite would be green without having run anything.

    ``plugin.suite.run`` calls it for a verdict that failed, and prints the result.
    """
    broken_off = premature_end(check, trace)
    if broken_off is not None and _UNWRITTEN.search(broken_off.message):
        return None
    facets: dict[str, Any] = {
        "strategy": cell.strategy,
        "precision": cell.precision,
        **dict(cell.options),
    }
    if broken_off is not None:
        # Without the rank, because any rank may be the first to raise. The whole text, if the
        # message has another form.
        findings = [_without_rank(broken_off) or broken_off.text]
    else:
        findings = law_of(cell).findings(check, cell, trace)
    if broken_off is not None and broken_off.action in BUILDS:
        # An error at build is how a trainer says that it does not support a cell.
        expectation = refuses(match=_constant_part(findings[0]) or ".", **facets)
    else:
        # A dictionary, to have each pattern only once.
        patterns = dict.fromkeys(_constant_part(finding) for finding in findings)
        match = "|".join(patterns)
        expectation = fails(check.name, reason="a link to the issue", match=match, **facets)
    # Try it: the pattern may be too short to cover each finding, or the run may have crashed.
    verdict = judge(check, cell, trace, [expectation])
    excuses = verdict.status in {Status.KNOWN, Status.REFUSED}
    if excuses and len(expectation.match) <= _LONGEST_MATCH:
        return expectation
    return None


def _constant_part(finding: str) -> str:
    """Return the longest part of a finding's first line that is the same in each run.

    It has no numbers, and nothing that a regular expression must escape. Of ``rank 1: the loss of
    step 2 is 0.7`` it is ``the loss of step``.
    """
    first_line, _, _ = finding.strip().partition("\n")
    longest = max(_VARIABLE.split(first_line), key=len)
    return longest.strip(" ,;:")


def premature_end(check: Check, trace: Trace) -> RunFailure | None:
    """Return the failure of a run that ended before the last snapshots that the check needs.

    None if all runs got that far. A failure after them does not concern the check.
    """
    for run in trace:
        failure = run.end
        if failure is None:
            continue
        # ``raises`` has the names of runs that may end in an exception, as one that loads a damaged
        # checkpoint: it is for the check to judge. A crash or a hang is not.
        if run.name in check.raises and failure.kind != "raised":
            return failure
        # ``until`` has the run, the action and which one of that action: ("train", "step", 2) are
        # the snapshots after the third step.
        for name, action, nth in check.until:
            if name == run.name and _ended_before(failure, run.at(action, nth)):
                return failure
    return None


def _ended_before(failure: RunFailure, snapshots: Sequence[Snapshot]) -> bool:
    """Tell whether a run ended before it had taken these snapshots, or in that action itself.

    The latter is so if some ranks finished the action, and another rank failed in it.
    """
    # The index is that of an action in its run; -1 is outside any action.
    if failure.index < 0 or not snapshots:
        return True
    return failure.index <= snapshots[0].index


def _builds(trace: Trace) -> bool:
    """Tell whether a run of the trace builds the trainer."""
    return any(run.at("build") for run in trace)


def _expected_refusal(
    covering: Iterable[Expectation], failure: RunFailure | None
) -> Expectation | None:
    """Return the declared refusal to judge by: one that matches, else one that must occur.

    None if there is neither: then the verdict does not depend on refusals.
    """
    refusals = [expectation for expectation in covering if expectation.kind == "refuses"]
    for refusal in refusals:
        if _refused(refusal, failure):
            return refusal
    for refusal in refusals:
        if refusal.strict:
            return refusal
    return None


def _refused(refusal: Expectation, end: RunFailure | None) -> bool:
    """Tell whether the run ended with the exception that the refusal declares."""
    if end is None or end.kind != "raised":
        return False
    return refusal.matches(f"{end.message}\n{end.text}")


def _refusal(
    check: Check, cell: Cell, trace: Trace, refusal: Expectation, end: RunFailure | None
) -> Verdict:
    """Return the verdict where a refusal is declared.

    It is ``refused`` (a success) if each rank raised the declared error at build. It is ``late`` if
    the error came after the build, and failed if another error came, or none.

    Args:
        check: The check.
        cell: The cell.
        trace: The trace.
        refusal: The declared refusal.
        end: The failure of the run; None if all runs ran to the end.
    """
    declared = f"declared: {refusal}"

    def verdict(status: Status, text: str, reason: str = refusal.reason) -> Verdict:
        return Verdict(check.name, cell.id, status, text, reason)

    if end is None:
        expected = f"expected to be refused at build with a message like {refusal.match!r}"
        return verdict(Status.FAILED, f"{expected}, but it ran to the end\n{declared}")
    if end.kind != "raised":
        return verdict(Status.from_name(end.kind), end.text)
    if not _refused(refusal, end):
        problem = f"refused with another message than {refusal.match!r}"
        return verdict(Status.FAILED, f"{end.text}\n\n{problem}\n{declared}")
    if end.action not in BUILDS:
        problem = f"refused only at {end.action!r}, after build; expected at build"
        return verdict(Status.LATE, f"{problem}\n{declared}\n\n{end.text}")
    built = _ranks_that_built(trace, end)
    if built:
        problem = f"refused on some ranks only; built on {listed_ranks(built)}"
        return verdict(Status.FAILED, f"{problem}\n{declared}\n\n{end.text}")
    reason = refusal.reason or _without_rank(end) or end.message
    return verdict(Status.REFUSED, end.message, reason)


def _ranks_that_built(trace: Trace, end: RunFailure) -> list[int]:
    """Return the ranks on which ``build`` went well, in the run with that failure, ascending."""
    ranks: list[int] = []
    for run in trace:
        if run.end == end:
            ranks.extend(snapshot.rank for snapshot in run.at("build"))
    return sorted(ranks)


def _without_rank(end: RunFailure) -> str:
    """Return the exception of a message ``rank 1 raised ValueError: ...``, without the rank.

    Which rank raises first is chance. The result is empty for a message of another form.
    """
    return end.message.partition(" raised ")[2]


def _known(
    check: Check, cell: Cell, declared: list[Expectation], findings: list[str], *, complete: bool
) -> Verdict:
    """Return the verdict where bugs are declared: known, fixed, failed or passed.

    Args:
        check: The check.
        cell: The cell.
        declared: The declared bugs that concern the findings, not empty.
        findings: What the check found, or the error of a run that ended early.
        complete: Whether the runs got as far as the check needs, so that ``findings`` are all there
            are.
    """
    occurred = _occurred(declared, findings)
    missing: list[Expectation] = []
    for expectation in declared:
        if expectation.strict and expectation not in occurred:
            missing.append(expectation)
    to_remove = " and ".join(map(str, missing))
    fixed = f"fixed? Then remove {to_remove}"

    def verdict(status: Status, text: str, about: Expectation) -> Verdict:
        return Verdict(check.name, cell.id, status, text, about.reason)

    # Bugs that only may show have not shown.
    if not findings and not missing:
        return Verdict(check.name, cell.id, Status.PASSED)
    if not findings:
        return verdict(Status.FIXED, f"declared to fail, but it passes: {fixed}", missing[0])
    if not occurred:
        return _failed_otherwise(check, cell, declared, findings)
    known = occurred[0]
    if complete:
        # Each finding must be declared: a known bug must not hide another one.
        others = _unexplained(findings, declared)
        if others:
            problem = f"fails as declared too: {known}"
            return verdict(Status.FAILED, f"{message(others)}\n\n{problem}", known)
        if missing:
            problem = f"fails as declared ({known}), and not as declared besides: {fixed}"
            return verdict(Status.FIXED, f"{problem}\n\n{message(findings)}", missing[0])
    return _known_as(check, cell, occurred, findings)


def _failed_otherwise(
    check: Check, cell: Cell, declared: Iterable[Expectation], findings: list[str]
) -> Verdict:
    """Return the verdict of a failure that no declared bug explains.

    It names the first declared bug whose absence is news. A known issue that shows only sometimes
    is none: nobody who reads the failure expected it.
    """
    text = message(findings)
    for expectation in declared:
        if expectation.strict or not expectation.of_known_issue:
            problem = f"fails otherwise than declared: {expectation}"
            text = f"{text}\n\n{problem}"
            return Verdict(check.name, cell.id, Status.FAILED, text, expectation.reason)
    return Verdict(check.name, cell.id, Status.FAILED, text)


def _known_as(
    check: Check, cell: Cell, occurred: Iterable[Expectation], findings: list[str]
) -> Verdict:
    """Return the verdict of a failure that these known bugs explain."""
    reasons = tuple(dict.fromkeys(expectation.reason for expectation in occurred))
    reason = "; and ".join(reasons)
    return Verdict(check.name, cell.id, Status.KNOWN, message(findings), reason, reasons)


def _occurred(declared: Iterable[Expectation], findings: list[str]) -> list[Expectation]:
    """Return the declared bugs whose ``match`` is in a finding, or in all findings together."""
    if not findings:
        return []
    # The verdict's message shows 12 findings at most; a bug may match one that it leaves out.
    texts = ["\n".join(findings), *findings]
    return [expectation for expectation in declared if _matches_any(expectation, texts)]


def _matches_any(expectation: Expectation, texts: Iterable[str]) -> bool:
    """Tell whether the expectation matches one of the texts."""
    return any(expectation.matches(text) for text in texts)


def _unexplained(findings: Iterable[str], declared: Sequence[Expectation]) -> list[str]:
    """Return the findings that no declared bug explains."""
    return [finding for finding in findings if not _is_explained(finding, declared)]


def _is_explained(finding: str, declared: Iterable[Expectation]) -> bool:
    """Tell whether one of the declared bugs explains the finding."""
    return any(expectation.explains(finding) for expectation in declared)
