"""Faults in the trainer of a suite: each check of the cell says which rank, in which verb, and nothing excuses a death."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.faults.conftest import Run, RunFaults

pytestmark = pytest.mark.spawn

#: Suite and check: the verdict; the ranks shown, and those that are folded; the second line of the report.
FAULTS: dict[tuple[str, str], tuple[str, list[int], set[int], str]] = {
    ("Raises", "names"): ("failed", [1], {0}, "rank 1 raised ValueError: the cause"),
    ("Raises", "resume"): ("failed", [1], {0}, "rank 1 raised ValueError: the cause"),
    ("RaisesInBuild", "names"): ("failed", [1], {0}, "rank 1 raised ValueError: not with me"),
    ("RefusesAlone", "names"): ("failed", [1], {0}, "refused on some ranks only; built on rank 0"),
    ("RefusesAlone", "resume"): ("failed", [1], {0}, "rank 1 raised ValueError: not with me"),
    ("Refuses", "resume"): ("failed", [0, 1], set(), "rank [01] raised ValueError: not with us"),
    ("Killed", "names"): ("crashed", [1], {0}, "rank 1 was killed by SIGKILL in verb 'step'"),
    ("Known", "names"): ("crashed", [1], {0}, "rank 1 was killed by SIGKILL in verb 'step'"),
    ("Segfault", "resume"): ("crashed", [1], {0}, "rank 1 was killed by SIGSEGV in verb 'load'"),
    ("ExitsWith0", "names"): ("crashed", [1], {0}, "rank 1 exited with code 0 without a report in verb 'save'"),
    ("Asleep", "names"): (
        "hung", [0, 1], set(),
        "time limit of 6 s: rank 0 waits in broadcast (default_pg, #*) at *; rank 1 is in step at *: time.sleep(600)",
    ),
    ("OtherCollective", "names"): (
        "hung", [0, 1], set(),
        "time limit of 6 s: different collectives: rank 0 waits in broadcast *; rank 1 waits in all_gather_object *",
    ),
}  # fmt: skip


def item(suite: str, check: str) -> str:
    return f"Test{suite}::test[ddp-fp32-w2:{check}]"


@pytest.fixture(scope="module")
def run(run_faults: RunFaults, workers: tuple[str, ...]) -> Run:
    return run_faults(
        "faults_suite.py",
        "-k",
        "names or resume and (Well or Raises or Refuses or Segfault)",
        "--distcompat-timeout=6",
        *workers,
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
def test_the_verdict_and_its_cause(suite: str, check: str, run: Run) -> None:
    verdict, causes, folded, said = FAULTS[suite, check]
    name = item(suite, check)
    assert run.outcome(name) == "failed"
    run.shows(name, f"ddp-fp32-w2: {check}: {verdict}", said)
    assert (sorted(run.causes(name)), run.consequences(name)) == (causes, folded)


def test_where_the_ranks_part(run: Run) -> None:
    said = [
        line for line in run.lines(item("OtherCollective", "names")) if line.startswith("different collectives at ")
    ]
    assert len(said) == 1
    pytest.LineMatcher(said).fnmatch_lines(
        ["different collectives at #* of default_pg: rank 0 broadcast of Int[[]*[]]; rank 1 all_gather of Long[[]1[]]"]
    )


def test_nothing_is_left(run: Run) -> None:
    assert not run.left_by_tests
    assert not run.left
