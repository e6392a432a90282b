"""Faults in the trainer of a suite: each check of the cell says which rank, in which action, and nothing excuses a death."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest
from tests.faults.expected import LATE, SOON
from tests.faults.forms import forms

if TYPE_CHECKING:
    from tests.faults.conftest import RunFaults
    from tests.faults.runs import Run

pytestmark = pytest.mark.spawn

#: Suite and check: the verdict; the ranks shown, and those that are folded; the second line of the report.
FAULTS: dict[tuple[str, str], tuple[str, list[int], set[int], str]] = {
    ("Raises", "names"): ("failed", [1], {0}, "rank 1 raised ValueError: the cause"),
    ("Raises", "resume"): ("failed", [1], {0}, "rank 1 raised ValueError: the cause"),
    ("RaisesInBuild", "names"): ("failed", [1], {0}, "rank 1 raised ValueError: not with me"),
    ("RefusesAlone", "names"): ("failed", [1], {0}, "refused on some ranks only; built on rank 0"),
    ("RefusesAlone", "resume"): ("failed", [1], {0}, "rank 1 raised ValueError: not with me"),
    ("Refuses", "resume"): ("failed", [0, 1], set(), "rank [01] raised ValueError: not with us"),
    ("Killed", "names"): ("crashed", [1], {0}, "rank 1 was killed by SIGKILL during 'step'"),
    ("Known", "names"): ("crashed", [1], {0}, "rank 1 was killed by SIGKILL during 'step'"),
    ("Segfault", "resume"): ("crashed", [1], {0}, "rank 1 was killed by SIGSEGV during 'load'"),
    ("ExitsWith0", "names"): ("crashed", [1], {0}, "rank 1 exited with code 0 without a report during 'save'"),
    ("Asleep", "names"): (
        "hung", [0, 1], set(),
        "time limit of 6 s: rank 0 waits in broadcast (default_pg, #*) at *; rank 1 is in step at *: time.sleep(600)",
    ),
    ("OtherCollective", "names"): (
        "hung", [0, 1], set(),
        "time limit of 6 s: different collectives: rank 0 waits in broadcast *; rank 1 waits in all_gather_object *",
    ),
}  # fmt: skip


#: On 4 ranks: a rank that is killed, one that sleeps, one in another collective. Of its peers one may be a broadcast ahead: they go down a tree.
AT_4: dict[str, tuple[str, list[int], set[int], str]] = {
    "Killed": ("crashed", [1], {0, 2, 3}, "rank 1 was killed by SIGKILL during 'step'"),
    "Asleep": (
        "hung", [0, 1, 2, 3], set(),
        "time limit of 6 s: rank*0* wait* in broadcast (default_pg, #*) at *; rank 1 is in step at *: time.sleep(600)*",
    ),
    "OtherCollective": (
        "hung", [0, 1, 2, 3], set(),
        "time limit of 6 s: different collectives: rank*0* wait* in broadcast *; rank 1 waits in all_gather_object *",
    ),
}  # fmt: skip
#: Seconds that each run has.
LIMIT = 6.0


def item(suite: str, check: str, world_size: int = 2) -> str:
    return f"Test{suite}::test[ddp-fp32-w{world_size}:{check}]"


@pytest.fixture(scope="module", params=forms("alone", "workers", "reused"))
def run(run_faults: RunFaults, request: pytest.FixtureRequest) -> Run:
    return run_faults(
        "faults_suite.py",
        "-k",
        "names or resume and (Well or Raises or Refuses or Segfault)",
        f"--distcompat-timeout={LIMIT:g}",
        *request.param.args,
    )


@pytest.fixture(scope="module")
def run_at_4(run_faults: RunFaults) -> Run:
    suites = " or ".join(("Well", *AT_4))
    return run_faults(
        "faults_suite.py", "-k", f"names and ({suites})", f"--distcompat-timeout={LIMIT:g}", FAULTS_WORLD_SIZE="4"
    )


def test_only_the_sound_trainer_passes(run: Run) -> None:
    assert run.code == pytest.ExitCode.TESTS_FAILED, run.out
    assert {name for name, end in run.outcomes.items() if end == "passed"} == {
        item("Well", "names"),
        item("Well", "resume"),
        # The trainer loads only to resume.
        item("Segfault", "names"),
        # Its refusal is declared.
        item("Refuses", "names"),
    }


@pytest.mark.parametrize(("suite", "check"), FAULTS)
def test_each_suite_fault_has_its_verdict_and_cause(suite: str, check: str, run: Run) -> None:
    verdict, causes, folded, expected = FAULTS[suite, check]
    name = item(suite, check)
    assert run.outcome(name) == "failed"
    run.shows(name, expected, f"ddp-fp32-w2: {check}: {verdict}")
    assert (sorted(run.causes(name)), run.consequences(name)) == (causes, folded)


def test_hangs_are_reported_soon_after_their_time_limit(run: Run) -> None:
    in_time(run, {item(suite, check): verdict for (suite, check), (verdict, *_) in FAULTS.items()}, 2)


def in_time(run: Run, verdicts: Mapping[str, str], world_size: int) -> None:
    """Hangs at the time limit of a run, not much later; all others soon, compared with a trainer that is well."""
    for name, verdict in verdicts.items():
        seconds, bare = run.seconds(name), run.seconds(item("Well", "names", world_size))
        if verdict == "hung":
            warming = 2 * bare if run.waits(1) > 1 else 0
            assert LIMIT <= seconds <= warming + run.waits(LIMIT + LATE), (name, seconds)
        else:
            assert seconds < bare + run.waits(SOON), (name, seconds, bare)


def test_the_report_shows_where_ranks_diverge(run: Run) -> None:
    part(run, 2)


def part(run: Run, world_size: int) -> None:
    name = item("OtherCollective", "names", world_size)
    expected = [line for line in run.lines(name) if line.startswith("different collectives at ")]
    assert len(expected) == 1
    each = ["all_gather of Long[[]1[]]" if rank == 1 else "broadcast of Int[[]*[]]" for rank in range(world_size)]
    parts = "; ".join(f"rank {rank} {what}" for rank, what in enumerate(each))
    pytest.LineMatcher(expected).fnmatch_lines([f"different collectives at #* of default_pg: {parts}"])


@pytest.mark.nightly
def test_on_4_ranks(run_at_4: Run) -> None:
    run = run_at_4
    passed = {item("Well", "names", 4): "passed"}
    assert run.outcomes == passed | {item(suite, "names", 4): "failed" for suite in AT_4}, run.out
    for suite, (verdict, causes, folded, expected) in AT_4.items():
        name = item(suite, "names", 4)
        run.shows(name, expected, f"ddp-fp32-w4: names: {verdict}")
        assert (sorted(run.causes(name)), run.consequences(name)) == (causes, folded)
        for rank in (0, 2, 3) if verdict == "hung" else ():
            pytest.LineMatcher(run.section(name, rank).splitlines()).fnmatch_lines(
                ["last collectives: *broadcast (default_pg, #*) of Int[[]*[]], unfinished"]
            )
    part(run, 4)
    in_time(run, {item(suite, "names", 4): verdict for suite, (verdict, *_) in AT_4.items()}, 4)
    assert not run.leftovers_by_test
    assert not run.leftovers


def test_no_process_file_or_lease_remains(run: Run) -> None:
    assert not run.leftovers_by_test
    assert not run.leftovers
