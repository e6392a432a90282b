"""One verdict from a check, a trace and what was declared."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import ADDED_CHECKS, Check
from pytest_distcompat.expect import Expectation, fails, may_fail, may_refuse, refuses
from pytest_distcompat.judge import declaration, judge, skipped
from pytest_distcompat.scenario import RESUME, RESUME_RUN, TRAIN, TRAIN_RUN, Run, Scenario
from pytest_distcompat.status import Status, Verdict
from pytest_distcompat.trace import RunFailure, RunTrace, Snapshot, Trace

if TYPE_CHECKING:
    from collections.abc import Iterable

CELL = Cell("fsdp2", "fp32")
KNOWN = fails("toy", reason="org/repo#1")
MASTERS = fails("toy", reason="org/repo#1", match="masters")
REFUSED = refuses("toy", match="not supported", reason="by design")


def lived(run: Run, end: RunFailure | None = None, *, together: bool = False) -> RunTrace:
    """a run on two ranks; where it broke off, rank 0 had done the action and rank 1 had not; ``together``: neither."""
    snapshots = []
    for index, action in enumerate(run.actions):
        for rank in range(2):
            if end is None or index < end.index:
                is_done = True
            else:
                is_done = index == end.index and rank == 0 and not together
            if is_done:
                snapshots.append(Snapshot(rank, run.name, action, index))
    return RunTrace(run.name, 2, tuple(snapshots), end)


def trace_of(*runs: RunTrace) -> Trace:
    return Trace.of("hand-made", runs)


def no_findings(cell: Cell, trace: Trace) -> tuple[str, ...]:
    return ()


def toy(*findings: str, until: tuple[str, int] = ("step", 2)) -> Check:
    return Check("toy", TRAIN, (("train", *until),), lambda cell, trace: findings)


def ended(kind: str, action: str = "", message: str = "boom", run: Run = TRAIN_RUN, nth: int = 0) -> RunFailure:
    """Broken off in the nth such action; outside of any without one."""
    index = -1
    if action:
        indices = [place for place, name in enumerate(run.actions) if name == action]
        index = indices[nth]
    return RunFailure(kind, f"rank 1 raised {message}", f"the whole story of {message}", action, index)


def verdict(check: Check, *declared: Expectation, end: RunFailure | None = None, together: bool = False) -> Verdict:
    """Return the verdict of a check on one training run."""
    train = lived(TRAIN_RUN, end, together=together)
    return judge(check, CELL, trace_of(train), declared)


def status(check: Check, *declared: Expectation, end: RunFailure | None = None, together: bool = False) -> Status:
    return verdict(check, *declared, end=end, together=together).status


def test_a_check_without_findings_passes() -> None:
    result = verdict(toy())
    assert result == Verdict("toy", "fsdp2-fp32-w2", Status.PASSED)
    assert result.ok


def test_a_check_fails_with_all_its_findings() -> None:
    result = verdict(toy("rank 0: stale", "rank 1: stale"))
    assert result.status == "failed"
    assert result.message == "ranks 0, 1: stale"
    assert result.ok is False


def test_hundreds_of_findings_are_cut() -> None:
    findings = [f"finding {number}" for number in range(300)]
    result = verdict(toy(*findings))
    lines = result.message.splitlines()
    assert lines[-2:] == ["finding 11", "... and 288 more"]


def test_a_skipped_cell_has_the_reason() -> None:
    result = skipped("toy", CELL, "needs 4 GPUs")
    assert result.status == "skipped"
    assert result.message == "needs 4 GPUs"
    assert result.reason == "needs 4 GPUs"
    assert result.ok is False
    assert result.check == "toy"
    assert result.cell == CELL.id


def test_a_known_failure() -> None:
    result = verdict(toy("rank 0: stale"), KNOWN)
    assert result.status == "known"
    assert result.message == "rank 0: stale"
    assert result.reason == "org/repo#1"
    assert not result.ok


def test_a_known_failure_that_passes_is_reported() -> None:
    result = verdict(toy(), KNOWN)
    assert result.status == "fixed?"
    assert result.reason == "org/repo#1"
    assert result.ok is False
    assert result.message == f"declared to fail, but it passes: fixed? Then remove {KNOWN}"


def test_a_failure_other_than_the_known_one() -> None:
    assert status(toy("rank 0: bfloat16 masters"), MASTERS) == "known"
    result = verdict(toy("rank 0: stale"), MASTERS)
    assert result.status == "failed"
    assert result.ok is False
    assert result.message == f"rank 0: stale\n\nfails otherwise than declared: {MASTERS}"


def test_a_failure_does_not_speak_of_known_issues_that_only_may_show() -> None:
    sometimes = replace(may_fail("toy", reason="org/repo#2", match="loss"), of_known_issue=True)
    result = verdict(toy("rank 0: stale"), sometimes)
    assert result.status == "failed"
    assert result.message == "rank 0: stale"
    assert result.reason == ""
    # What the suite's author declared is told, as is what must show.
    for other in (replace(sometimes, of_known_issue=False), replace(sometimes, strict=True)):
        result = verdict(toy("rank 0: stale"), sometimes, other)
        assert result.message == f"rank 0: stale\n\nfails otherwise than declared: {other}"
        assert result.reason == "org/repo#2"


def test_a_known_failure_hides_no_other_one() -> None:
    result = verdict(toy("bfloat16 masters", "rank 0: stale", "rank 1: stale"), MASTERS)
    assert result.status == "failed"
    assert result.reason == "org/repo#1"
    assert result.ok is False
    assert result.message == f"ranks 0, 1: stale\n\nfails as declared too: {MASTERS}"
    # Nor beyond what a message shows.
    known = [f"rank {rank}: bfloat16 masters" for rank in range(300)]
    result = verdict(toy(*known, "rank 300: stale"), MASTERS)
    assert result.message.startswith("rank 300: stale\n\n")


def test_consequences_of_a_known_failure_are_known_too() -> None:
    brings = fails("toy", reason="org/repo#1", match="masters", also=r"rank \d: stale|gone")
    assert status(toy("bfloat16 masters", "rank 0: stale", "all gone"), brings) == "known"
    result = verdict(toy("bfloat16 masters", "all stale"), brings)
    assert result.message.startswith("all stale\n\n")
    # By itself it is another bug.
    result = verdict(toy("rank 0: stale"), brings)
    assert result.message.startswith("rank 0: stale\n\nfails otherwise than declared: ")


@pytest.mark.parametrize(
    "another", [fails("toy", reason="org/repo#2", match="stale"), may_fail("*", reason="org/repo#2", match="stale")]
)
def test_findings_may_fit_any_of_two_known_failures(another: Expectation) -> None:
    for declared in ((MASTERS, another), (another, MASTERS)):
        result = verdict(toy("bfloat16 masters", "rank 0: stale"), *declared)
        assert result.status == "known"
        reasons = result.reason.split("; and ")
        assert set(reasons) == {MASTERS.reason, "org/repo#2"}
        result = verdict(toy("bfloat16 masters", "rank 0: stale", "gone"), *declared)
        assert result.message.startswith("gone\n\n")


def test_a_declared_message_may_begin_any_finding() -> None:
    masters = fails("toy", reason="org/repo#masters", match="^masters")
    stale = fails("toy", reason="org/repo#stale", match="^stale")
    result = verdict(toy("masters in bfloat16", "stale optimizer"), masters, stale)
    assert result.status == "known"
    assert result.reason == "org/repo#masters; and org/repo#stale"


def test_each_of_two_known_failures_must_occur() -> None:
    stale = fails("toy", reason="org/repo#2", match="stale")
    for declared in ((MASTERS, stale), (stale, MASTERS)):
        result = verdict(toy("bfloat16 masters"), *declared)
        assert result.status == "fixed?"
        assert result.reason == "org/repo#2"
        assert result.ok is False
        message = f"fails as declared ({MASTERS}), and not as declared besides: fixed? Then remove {stale}"
        assert result.message == f"{message}\n\nbfloat16 masters"
        # What broke off before it could show may be there still.
        raised = ended("raised", "step", "masters")
        assert status(toy(), *declared, end=raised) == "known"
        # A new bug is reported before one that is gone.
        result = verdict(toy("bfloat16 masters", "gone"), *declared)
        assert result.message.startswith("gone\n\n")
        result = verdict(toy(), *declared)
        first, second = declared
        assert result.status == "fixed?"
        assert result.message.endswith(f"fixed? Then remove {first} and {second}")
    rounding = may_fail("toy", reason="org/repo#2", match="stale")
    for declared in ((MASTERS, rounding), (rounding, MASTERS)):
        assert status(toy("bfloat16 masters"), *declared) == "known"
        assert status(toy(), *declared) == "fixed?"
        assert status(toy(), rounding) == "passed"


def test_lines_of_a_failed_run_need_not_be_declared_one_by_one() -> None:
    raised = ended("raised", "step", "boom\n\nTraceback: masters\n  in a line")
    assert status(toy(), MASTERS, end=raised) == "known"


def test_a_may_fail_declaration_excuses_no_other_failure() -> None:
    anywhere = may_fail("*", reason="org/repo#3", match="out of luck")
    assert status(toy("out of luck today"), anywhere) == "known"
    result = verdict(toy("stale"), anywhere)
    assert result.status == "failed"
    assert result.message == "stale"
    assert result.reason == ""
    assert status(toy(), anywhere) == "passed"


def test_an_exception_may_be_a_known_failure() -> None:
    matching = fails("toy", reason="org/repo#1", match="story of boom")
    boom = ended("raised", "step", "boom")
    bang = ended("raised", "step", "bang")
    assert status(toy(), KNOWN, end=boom) == "known"
    assert status(toy(), matching, end=boom) == "known"
    assert status(toy(), matching, end=bang) == "failed"


@pytest.mark.parametrize("kind", ["crashed", "hung"])
@pytest.mark.parametrize("declared", [(), (KNOWN,), (REFUSED,), (fails("*", reason="all is known"),)])
@pytest.mark.parametrize("action", ["", "build", "step"])
def test_nothing_covers_a_crash_or_a_hang(kind: str, declared: Iterable[Expectation], action: str) -> None:
    result = verdict(toy(), *declared, end=ended(kind, action, "not supported"))
    assert result.status == kind
    assert result.message == "the whole story of not supported"
    assert result.ok is False


@pytest.mark.parametrize("kind", ["raised", "crashed", "hung"])
@pytest.mark.parametrize(
    ("action", "nth", "is_affected"),
    [("build", 0, True), ("step", 1, True), ("step", 2, True), ("save", 0, False), ("step", 3, False)],
)
def test_a_run_broken_off_after_the_evidence_does_not_concern_the_check(
    kind: str, action: str, nth: int, *, is_affected: bool
) -> None:
    end = ended(kind, action, nth=nth)
    result = verdict(toy(until=("step", 2)), end=end)
    # Evidence that was found before the end stays evidence.
    with_finding = verdict(toy("stale"), end=end)
    if is_affected:
        expected = "failed" if kind == "raised" else kind
        assert result.status == expected
        assert with_finding.message.startswith("the whole")
    else:
        assert result.status == "passed"
        assert with_finding.message.startswith("stale")


def test_a_check_of_the_unwrapped_model_needs_no_more() -> None:
    check = toy(until=("build_model", 0))
    assert status(check, end=ended("crashed", "build")) == "passed"
    assert status(check, end=ended("crashed", "build_model")) == "crashed"


@pytest.mark.parametrize(("kind", "expected"), [("raised", "failed"), ("crashed", "crashed"), ("hung", "hung")])
@pytest.mark.parametrize("until", [("build_model", 0), ("step", 2), ("files", 0)])
def test_an_end_outside_of_any_action_concerns_every_check(kind: str, expected: str, until: tuple[str, int]) -> None:
    # All snapshots are there: it happened at exit.
    snapshots = lived(TRAIN_RUN).snapshots
    train = RunTrace("train", 2, snapshots, ended(kind))
    result = judge(toy(until=until), CELL, trace_of(train))
    assert result.status == expected
    assert result.message == "the whole story of boom"


SAME = fails("resume", reason="org/repo#4", match="TypeError: no state")


def after_load(error: str, *declared: Expectation, check: str = "midway") -> Verdict:
    """Return the verdict of a check whose resumed run raised that error when it loaded."""
    end = ended("raised", "load", error, RESUME_RUN)
    trace = trace_of(lived(TRAIN_RUN), lived(RESUME_RUN, end, together=True))
    resumes = Check(check, RESUME, (("resume", "step", 1),), no_findings)
    return judge(resumes, CELL, trace, declared)


def test_an_error_that_is_declared_for_another_check_of_the_cell_is_known() -> None:
    result = after_load("TypeError: no state\nin two lines", SAME)
    assert result.status == "known"
    assert result.reason == "org/repo#4"
    assert result.reasons == ("org/repo#4",)
    assert result.message == "the whole story of TypeError: no state\nin two lines"


@pytest.mark.parametrize(
    ("error", "declared"),
    [
        ("TypeError: no model", SAME),
        ("ValueError: no state", SAME),
        # What the error quotes, or what was on the stack, is not the error.
        ("RuntimeError: failed\nTypeError: no state", SAME),
        ("TypeError: no state", fails("resume", reason="a", match="TypeError: no state", strategy="ddp")),
        ("TypeError: no state", fails("resume", reason="a", match="the whole story")),
        ("TypeError: no state", fails("resume", reason="a", match="TypeError", until="2020-01-31")),
        ("TypeError: no state", refuses("resume", match="TypeError: no state")),
    ],
)
def test_another_error_than_is_declared_for_another_check_is_red(error: str, declared: Expectation) -> None:
    result = after_load(error, declared)
    assert result.status == "failed"
    assert result.message.startswith(f"the whole story of {error}")


def test_a_failure_that_is_declared_for_another_check_excuses_no_finding() -> None:
    assert status(toy("TypeError: no state"), SAME) == "failed"
    assert status(toy(), SAME) == "passed"


@pytest.mark.parametrize("kind", ["crashed", "hung"])
def test_no_declaration_of_another_check_covers_a_crash_or_a_hang(kind: str) -> None:
    end = ended(kind, "step", "TypeError: no state")
    assert status(toy(), SAME, end=end) == kind


def test_a_declaration_without_an_error_holds_for_another_check_if_its_run_raised_the_same() -> None:
    unnamed = fails("resume", reason="org/repo#4")
    assert after_load("TypeError: no state", unnamed).status == "known"
    for error, expected in (("TypeError: no state", "known"), ("TypeError: no model", "failed")):
        third = third_run(error)
        # The check resume has no part in the run that raised it.
        alone = trace_of(lived(TRAIN_RUN), third)
        assert judge(OF_THIRD_RUN, CELL, alone, [unnamed]).status == "failed"
        beside = trace_of(lived(TRAIN_RUN), resumed_without_state(), third)
        assert judge(OF_THIRD_RUN, CELL, beside, [unnamed]).status == expected


OF_THIRD_RUN = Check("restarts", TRAIN, (("third", "step", 1),), no_findings)


def third_run(error: str) -> RunTrace:
    """Return a run of which no action is done, as its load raised that error."""
    return RunTrace("third", 2, (), ended("raised", "load", error, RESUME_RUN))


def resumed_without_state() -> RunTrace:
    end = ended("raised", "load", "TypeError: no state", RESUME_RUN)
    return lived(RESUME_RUN, end, together=True)


@pytest.mark.parametrize(
    ("needs", "error", "expected"),
    [
        ((("resume", "step", 1),), "TypeError: no state", "known"),
        ((("resume", "step", 1),), "TypeError: no model", "failed"),
        # It has what it needs of the run that raised, no part in it, or says of no run what it needs, as a walk.
        ((("resume", "build", 0),), "TypeError: no state", "failed"),
        ((("train", "step", 1),), "TypeError: no state", "failed"),
        ((), "TypeError: no state", "failed"),
    ],
)
def test_a_declaration_without_an_error_may_be_of_a_check_that_an_extension_adds(
    monkeypatch: pytest.MonkeyPatch, needs: tuple[tuple[str, str, int], ...], error: str, expected: str
) -> None:
    added = Check("extended", RESUME, needs, no_findings)
    monkeypatch.setitem(ADDED_CHECKS.by_name, "extended", added)
    trace = trace_of(lived(TRAIN_RUN), resumed_without_state(), third_run(error))
    declared = fails("extended", reason="org/repo#4")
    assert judge(OF_THIRD_RUN, CELL, trace, [declared]).status == expected


def test_an_error_of_another_check_goes_beside_what_the_check_itself_declares() -> None:
    own = fails("midway", reason="org/repo#5", match="the random state")
    assert after_load("TypeError: no state", own, SAME).reason == "org/repo#4"
    assert after_load("TypeError: no model", own, SAME).status == "failed"
    ended_excuse = fails("midway", reason="org/repo#5", match="TypeError", until="2020-01-31")
    assert after_load("TypeError: no state", ended_excuse, SAME).reason == "org/repo#4"


OF_TWO_RUNS = Check("toy", RESUME, (("train", "step", 4), ("resume", "step", 1)), no_findings)


def status_of_two(train: RunFailure | None = None, resume: RunFailure | None = None) -> Status:
    """Return the status of a check whose two runs broke off so."""
    trace = trace_of(lived(TRAIN_RUN, train), lived(RESUME_RUN, resume))
    return judge(OF_TWO_RUNS, CELL, trace).status


def test_a_check_of_two_runs_needs_both() -> None:
    assert status_of_two() == "passed"
    assert status_of_two(train=ended("raised", "save")) == "failed"
    assert status_of_two(resume=ended("hung", "load", run=RESUME_RUN)) == "hung"
    assert status_of_two(train=ended("raised", "files")) == "passed"


def test_a_run_that_was_never_begun_for_the_one_before_it() -> None:
    # As the runner writes it: no snapshots, and the end of the run whose checkpoint it would have loaded.
    end = ended("raised", "files")
    trace = trace_of(lived(TRAIN_RUN, end), RunTrace("resume", 2, (), end))
    assert judge(OF_TWO_RUNS, CELL, trace).status == "failed"


@pytest.mark.parametrize("action", ["build_model", "build"])
def test_refused_at_build_as_declared(action: str) -> None:
    end = ended("raised", action, "ValueError: not supported")
    result = verdict(toy(), REFUSED, end=end, together=True)
    assert result.status == "refused"
    assert result.message == "rank 1 raised ValueError: not supported"
    assert result.reason == "by design"
    assert result.ok


def test_where_the_machine_decides_it_is_refused_or_all_holds() -> None:
    either = may_refuse("toy", match="not supported")
    declared_error = ended("raised", "build", "ValueError: not supported")
    other_error = ended("raised", "build", "ValueError: other")
    assert status(toy(), either, end=declared_error, together=True) == "refused"
    assert status(toy(), either, end=other_error) == "failed"
    assert status(toy(), either) == "passed"


def test_where_rounding_decides_it_is_known_or_it_passes() -> None:
    either = may_fail("toy", reason="rounding", match="off")
    assert status(toy("a bit off"), either) == "known"
    assert status(toy("something else"), either) == "failed"
    assert status(toy(), either) == "passed"


def test_a_refusal_without_a_reason_gives_the_error_for_one() -> None:
    bare = refuses("toy", match="not supported")
    end = ended("raised", "build", "ValueError: not supported")
    result = verdict(toy(), bare, end=end, together=True)
    assert result.status == "refused"
    assert result.reason == "ValueError: not supported"


def test_refused_by_one_rank_while_another_went_on() -> None:
    result = verdict(toy(), REFUSED, end=ended("raised", "build", "ValueError: not supported"))
    assert result.status == "failed"
    assert result.ok is False
    assert result.message.startswith(f"refused on some ranks only; built on rank 0\ndeclared: {REFUSED}\n\n")


def test_refused_with_another_message() -> None:
    result = verdict(toy(), REFUSED, end=ended("raised", "build"))
    assert result.status == "failed"
    assert result.ok is False
    assert result.message.startswith("the whole story of boom\n\n")
    assert result.message.endswith(f"\nrefused with another message than 'not supported'\ndeclared: {REFUSED}")


@pytest.mark.parametrize("action", ["step", "save", "files"])
def test_refused_late(action: str) -> None:
    # In any action after build, whether or not the check itself has all it needs by then.
    result = verdict(toy(), REFUSED, end=ended("raised", action, "not supported"))
    assert result.status == "late"
    assert result.ok is False
    assert result.message.startswith(
        f"refused only at {action!r}, after build; expected at build\ndeclared: {REFUSED}\n\n"
    )


@pytest.mark.parametrize("findings", [(), ("stale",)])
def test_never_refused(findings: tuple[str, ...]) -> None:
    result = verdict(toy(*findings), REFUSED)
    assert result.status == "failed"
    assert result.ok is False
    assert result.message == (
        "expected to be refused at build with a message like 'not supported', but it ran to the end\n"
        f"declared: {REFUSED}"
    )


def test_a_check_whose_runs_build_nothing_cannot_be_refused_at_build() -> None:
    reading = Run("reading", ("rows",))
    check = replace(toy("row 3 is given twice"), scenario=Scenario("reading", (reading,)), until=())
    trace = trace_of(lived(reading))
    assert judge(check, CELL, trace, [REFUSED]).message == "row 3 is given twice"
    sound = replace(toy(), scenario=check.scenario, until=())
    assert judge(sound, CELL, trace, [REFUSED]).status == "passed"


@pytest.mark.parametrize("kind", ["crashed", "hung"])
def test_a_refusal_is_no_crash_later(kind: str) -> None:
    result = verdict(toy(), REFUSED, end=ended(kind, "save", "not supported"))
    assert result.status == kind
    assert result.ok is False


def test_a_refusal_goes_before_a_known_failure() -> None:
    end = ended("raised", "build", "not supported")
    assert status(toy(), KNOWN, REFUSED, end=end, together=True) == "refused"


@pytest.mark.parametrize(
    "declared",
    [
        fails("other", reason="a bug"),
        fails("toy", reason="a bug", strategy="ddp"),
        refuses("toy", match="x", world_size=4),
    ],
)
def test_a_declaration_for_other_cells_is_no_excuse(declared: Expectation) -> None:
    assert status(toy("stale"), declared) == "failed"
    assert status(toy(), declared) == "passed"


def test_an_exception_without_a_text_is_a_failure() -> None:
    end = RunFailure("raised", "", "", "build", 1)
    assert status(toy(), end=end) == "failed"


def test_of_two_things_that_are_not_supported_one_is_refused() -> None:
    another = refuses("toy", match="no such mode", reason="nor this")
    for declared in ((REFUSED, another), (another, REFUSED)):
        for text, reason in (("not supported", "by design"), ("no such mode", "nor this")):
            end = ended("raised", "build", text)
            result = verdict(toy(), *declared, end=end, together=True)
            assert result.status == "refused"
            assert result.reason == reason
        boom = ended("raised", "build", "boom")
        result = verdict(toy(), *declared, end=boom, together=True)
        lines = result.message.splitlines()
        assert result.status == "failed"
        assert lines[-2] == f"refused with another message than {declared[0].match!r}"
        assert status(toy(), *declared) == "failed"


@pytest.mark.parametrize(
    ("findings", "end", "match"),
    [
        (("step 3: the loss is 0.25 (1e-3 allowed)",), None, "the loss is"),
        (("rank 0: a of b [x]", "rank 1: a of b [y]"), None, "a of b"),
        (("one thing", "and another"), None, "one thing|and another"),
        ((), ended("raised", "step", "ValueError: no"), "ValueError: no"),
        ((), ended("raised", "build", "ValueError: no 3"), "ValueError: no"),
    ],
)
def test_a_failure_has_a_declaration_that_covers_it(
    findings: tuple[str, ...], end: RunFailure | None, match: str
) -> None:
    check = toy(*findings)
    trace = trace_of(lived(TRAIN_RUN, end, together=True))
    made = declaration(check, CELL, trace)
    assert made is not None
    assert made.match == match
    result = judge(check, CELL, trace, [made])
    if made.kind == "refuses":
        assert result.status == "refused"
    else:
        assert result.status == "known"


@pytest.mark.parametrize("kind", ["crashed", "hung", "leaked"])
def test_a_crash_or_hang_prints_no_declaration(kind: str) -> None:
    trace = trace_of(lived(TRAIN_RUN, ended(kind, "build")))
    assert declaration(toy(), CELL, trace) is None


@pytest.mark.parametrize(
    "text", ["TODO: return the model of train", "MyDriver has no save(); a driver needs build_model"]
)
def test_a_method_that_is_not_written_prints_no_declaration(text: str) -> None:
    """Pasted into expect, it would make a suite green that runs nothing."""
    end = ended("raised", "build", f"NotImplementedError: {text}")
    trace = trace_of(lived(TRAIN_RUN, end, together=True))
    assert declaration(toy(), CELL, trace) is None
    refused = ended("raised", "build", "NotImplementedError: no FSDP here")
    trace = trace_of(lived(TRAIN_RUN, refused, together=True))
    assert declaration(toy(), CELL, trace) is not None


def test_a_declaration_that_ended_no_longer_excuses_and_says_so() -> None:
    past = fails("toy", reason="org/repo#1", match="masters", until="2020-01-31")
    result = verdict(toy("rank 0: no masters"), past)
    assert result.status == "failed"
    assert result.message == f"rank 0: no masters\n\nthe quarantine ended on 2020-01-31: {past}"
    # It never excused another failure, and a check that passes is fixed or was never red.
    assert verdict(toy("rank 0: stale"), past).message == "rank 0: stale"
    assert status(toy(), past) == "passed"
    assert status(toy("masters"), past, MASTERS) == "known"
    still = fails("toy", reason="a", until="2999-12-31")
    assert status(toy("masters"), still) == "known"


def test_a_refusal_that_ended_is_red() -> None:
    past = refuses("toy", match="not supported", until="2020-01-31")
    raised = ended("raised", "build", "ValueError: not supported")
    result = verdict(toy(), past, end=raised)
    assert result.status == "failed"
    assert result.message.endswith(f"the quarantine ended on 2020-01-31: {past}")
    crashed = ended("crashed", "build", "ValueError: not supported")
    result = verdict(toy(), past, end=crashed)
    assert result.status == "crashed"
    assert "quarantine" not in result.message
