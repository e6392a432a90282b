"""``torchrun -m pytest``: existing ranks run the same tests in step, and rank 0 reports the worst outcome."""

from __future__ import annotations

import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tests.plugin.conftest import Run, Torchrun, codes

pytestmark = pytest.mark.spawn


def show(text: str, *lines: str) -> None:
    pytest.LineMatcher(text.splitlines()).fnmatch_lines(lines)


def phases_that_failed(run: Run) -> list[str]:
    return [report["when"] for report in run.reports if report["outcome"] == "failed"]


# Verdicts.

ENDS = {
    "test_ordinary": "passed",
    "test_property": "passed",
    "test_group": "passed",
    "test_shared_dir": "passed",
    "test_cells[ddp-fp32-w2]": "passed",
    "test_for_four": "skipped",
    "test_one_fails": "failed",
    "test_one_fails_and_a_fixture_waits": "failed",
    "test_group_after_a_failure": "passed",
    "test_own_group_after_a_failure": "passed",
    "test_both_fail": "failed",
    "test_one_skips": "failed",
    "test_both_skip": "skipped",
    "test_one_raises_in_setup": "failed",
    "test_one_raises_in_teardown": "failed",
    "test_one_fails_as_expected": "xfailed",
    "test_xfail_and_words": "failed",
    "test_xfail_and_fail_late": "failed",
    "test_xfail_and_wait": "xfailed",
    "test_xfail_in_setup_and_fail": "failed",
    "test_xfail_in_setup_and_pass": "xfailed",
    "test_xfail_and_teardown": "failed",
    "test_none_fails_as_expected": "failed",
    "test_may_fail": "xpassed",
    "test_a_script": "skipped",
    "test_a_pytest_that_a_test_starts_is_no_rank": "passed",
    "test_known": "failed",
    "test_known_of_a_marked_one": "xfailed",
    "test_known_of_one_rank": "xfailed",
}
TEXTS: dict[str, list[str]] = {
    "test_for_four": ["*the test is for 4 ranks, this launch has 2*"],
    "test_one_fails": [
        "rank 1 failed: assert 1 == 0",
        "--- rank 1: failed: assert 1 == 0 ---",
        ">       assert RANK == 0",
        "consequences:",
        "  rank 0 failed: *",
        "reproduce: torchrun --nproc-per-node 2 -m pytest test_launch.py::test_one_fails*",
    ],
    "test_both_fail": ["rank ? failed: ValueError: of rank ?", "--- rank ?: *", "--- rank ?: *"],
    "test_one_skips": ["rank 1 skipped (only me) while other ranks went on", "*test_launch.py:*: Skipped: only me"],
    "test_both_skip": ["*rank 0*"],
    "test_one_raises_in_setup": ["rank 1 failed in setup: RuntimeError: on the way up"],
    "test_one_raises_in_teardown": ["rank 1 failed in teardown: RuntimeError: on the way down"],
    "test_xfail_and_words": ["rank 0 failed: RuntimeError: Connection refused", "*rank 1: xfailed: not yet*"],
    "test_xfail_and_fail_late": ["rank 0 failed: ValueError: late"],
    "test_xfail_in_setup_and_fail": ["rank 0 failed: AssertionError: the call*", "*rank 1: xfailed: not yet*"],
    "test_xfail_and_teardown": ["rank ? failed in teardown: RuntimeError: on the way down"],
    "test_none_fails_as_expected": ["[[]XPASS(strict)[]] of the mark"],
    "test_a_script": ["*the fixture distcompat starts ranks of its own: run pytest without torchrun*"],
    "TestSuite::test[ddp-fp32-w2:active]": ["*a suite starts ranks of its own: run pytest without torchrun*"],
}


#: The third is about a test that fails otherwise: the command is none of its words.
KNOWN = """version = 1
[[issue]]
match = "KeyError: ._orig_mod"
reason = "org/repo#1"

[[issue]]
test = "test_known_of_one_rank"
match = "strictly known"
reason = "org/repo#2"

[[issue]]
test = "test_one_fails$"
match = "no such words|reproduce: "
reason = "org/repo#3"
"""


@pytest.fixture(scope="module")
def verdicts(torchrun: Torchrun) -> Run:
    """All of ``inside_launch.py``."""
    return torchrun(Path(__file__).with_name("inside_launch.py"), "--junitxml=junit.xml", "-ra", known=KNOWN)


def test_every_test_has_one_verdict_and_never_a_weaker_one_than_its_worst_rank(verdicts: Run) -> None:
    of_functions = {}
    of_suite = {}
    for name, outcome in verdicts.outcomes.items():
        if "TestSuite" in name:
            of_suite[name] = outcome
        else:
            of_functions[name] = outcome
    assert of_functions == ENDS, verdicts.out
    assert set(of_suite.values()) == {"skipped"}


@pytest.mark.parametrize("name", TEXTS)
def test_a_failure_shows_all_ranks(name: str, verdicts: Run) -> None:
    show(verdicts.text(name), *TEXTS[name])


def test_a_rank_that_lost_its_peer_is_no_error_of_its_own(verdicts: Run) -> None:
    """The fixture waits for a rank whose connections are cut: that is reported once, with the call."""
    reports = [report for report in verdicts.reports if report["nodeid"].endswith("a_fixture_waits")]
    phases = [(report["when"], report["outcome"]) for report in reports]
    assert phases == [
        ("setup", "passed"),
        ("call", "failed"),
        ("teardown", "passed"),
    ]


def test_rank_0_alone_reports(verdicts: Run) -> None:
    assert verdicts.out.count("test session starts") == 1
    phases = {(report["nodeid"], report["when"]) for report in verdicts.reports}
    assert len(phases) == len(verdicts.reports)
    junit = ET.parse(verdicts.directory / "junit.xml")
    cases = list(junit.iter("testcase"))
    case_by_name = {case.get("name"): case for case in cases}
    assert len(cases) == len(case_by_name) == len(verdicts.outcomes)
    properties = []
    for element in case_by_name["test_property"].iter("property"):
        name = str(element.get("name"))
        if "distcompat" not in name:
            properties.append((name, element.get("value")))
    assert properties == [("same", "2"), ("of rank", "0"), ("of rank (rank 1)", "1")]
    assert verdicts.sections("test_one_fails")["Captured stdout call (rank 1)"] == "printed by 1\n"
    show(verdicts.out, "distcompat: inside a launch of 2 ranks, on cpu")


def test_an_entry_that_no_rank_matches_is_to_be_removed(verdicts: Run) -> None:
    lines = [line for line in verdicts.out.splitlines() if line.startswith("remove me")]
    expected = "remove me: known issues known.toml: issue 3 (org/repo#3): covers 1 that ran, excused none"
    assert lines == [expected], verdicts.out
    assert "declared to fail" not in verdicts.out


def test_all_ranks_end_with_the_same_exit_code(verdicts: Run) -> None:
    assert verdicts.code == 1
    assert codes(verdicts) == {0: 1, 1: 1}, verdicts.out


@pytest.mark.nightly
def test_a_launch_without_failures_exits_with_0(torchrun: Torchrun) -> None:
    source = (
        "import pytest\n@pytest.mark.distcompat\ndef test(process_group): pass\n@pytest.mark.skip\ndef test_b(): pass\n"
    )
    run = torchrun(source)
    assert run.code == 0, run.out
    assert run.outcomes == {"test": "passed", "test_b": "skipped"}
    assert codes(run) == {}


@pytest.mark.nightly
def test_a_launcher_without_a_store_works(environment: dict[str, str], tmp_path: Path) -> None:
    """As composer's: it sets the variables, and rank 0 opens the store."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    source = Path(__file__).with_name("inside_launch.py").read_text(encoding="utf-8")
    (tmp_path / "test_launch.py").write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "group or one_fails"]

    def start(rank: str) -> subprocess.Popen[str]:
        env = {
            **environment,
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }
        return subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    rank_0 = start("0")
    rank_1 = start("1")
    out_0, _ = rank_0.communicate(timeout=150)
    out_1, _ = rank_1.communicate(timeout=150)
    assert rank_0.returncode == 1, out_0
    assert rank_1.returncode == 1, out_1
    show(out_0, "*= 3 failed, 3 passed, *deselected, 1 xfailed in *")
    assert "passed" not in out_1


# What ends the session.

DIES = """
import os, time, pytest

@pytest.mark.distcompat
def test_before(process_group): pass

@pytest.mark.distcompat(timeout={limit})
def test_it(process_group, rank):
    import torch
    {body}
    torch.distributed.all_reduce(torch.ones(1))

def test_after(): raise AssertionError("nobody gets here")
"""


@pytest.mark.parametrize(
    ("limit", "body", "expected", "ended"),
    [
        pytest.param(
            60,
            "rank == 1 and os.kill(os.getpid(), 9)",
            ["rank 1 ended without a report", "consequences:", "  rank 0 failed: *"],
            {0: 1, 1: -9},
            id="killed",
        ),
        pytest.param(
            60,
            "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(100)",
            ["rank 1 ended without a report", "consequences:", "  rank 0 was killed by SIGTERM"],
            {0: 1, 1: -9},
            id="killed_while_the_other_sleeps",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            10,
            "rank == 1 and time.sleep(100)",
            [
                "time limit of 10 s: rank 0 waits in all_reduce at *; rank 1 is in test_it at *time.sleep(100)",
                "--- rank 1*",
            ],
            {0: 1, 1: 1},
            id="rank_1_hangs",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            10,
            "rank == 0 and time.sleep(100)",
            ["time limit of 10 s: rank 0 is in test_it at *time.sleep(100); rank 1 waits in all_reduce at *"],
            {0: 1, 1: 1},
            id="rank_0_hangs",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            6,
            "rank == 1 and time.sleep(100) or pytest.xfail('not yet')",
            ["time limit of 6 s: rank 1 is in test_it at *", "*rank 0: xfailed: not yet*"],
            {0: 1, 1: 1},
            id="rank_1_hangs_beside_an_xfail",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_dead_or_hung_rank_is_reported_and_ends_the_session(
    limit: int, body: str, expected: list[str], ended: dict[int, int], torchrun: Torchrun
) -> None:
    run = torchrun(DIES.format(body=body, limit=limit), "--junitxml=junit.xml")
    assert run.outcomes == {"test_before": "passed", "test_it": "failed"}, run.out
    assert phases_that_failed(run) == ["call"]
    show(run.text("test_it"), *expected)
    show(run.out, "*= 1 failed, 1 passed in *")
    assert run.code == 1, run.out
    assert codes(run) == ended
    assert "test_it" in (run.directory / "junit.xml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param("pytest.exit('disk is full')", "rank 1 failed: *Exit: disk is full", id="exit"),
        pytest.param(
            "request.session.shouldfail = 'no quota'",
            "rank 1 failed*: no quota",
            id="shouldfail",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "request.session.shouldstop = 'no quota'",
            "rank 1 failed*: no quota",
            id="shouldstop",
            marks=pytest.mark.nightly,
        ),
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", "rank 1 received SIGTERM, *", id="sigterm"),
    ],
)
def test_a_rank_that_leaves_says_why(body: str, expected: str, torchrun: Torchrun) -> None:
    """It was 'rank 1 ended without a report', and nothing at all of SIGTERM."""
    source = "import os, signal, pytest\nRANK = os.environ['RANK']\n"
    source += f"def test_it(request):\n    if RANK == '1': {body}\n"
    run = torchrun(f"{source}def test_next(): pass\n")
    failed = [name for name, outcome in run.outcomes.items() if outcome == "failed"]
    assert len(failed) == 1, run.out
    (name,) = failed
    show(run.text(name), expected)
    assert run.code == 1


@pytest.mark.nightly
def test_a_rank_that_hangs_on_after_sigterm_ends_the_session(torchrun: Torchrun) -> None:
    """The session went on for one phase, which failed as the one of a rank that had ended without a report."""
    source = "import os, signal, time\nRANK = os.environ['RANK']\ndef test_it():\n"
    source += "    if RANK == '1':\n        os.kill(os.getpid(), signal.SIGTERM)\n        time.sleep(100)\n"
    run = torchrun(f"{source}def test_next(): pass\n")
    assert run.outcomes == {"test_it": "failed"}, run.out
    assert phases_that_failed(run) == ["call"]
    show(run.text("test_it"), "rank 1 was killed by SIGTERM")
    assert run.code == 1


# Collection.

COLLECTED = """
import os, pytest
RANK = int(os.environ["RANK"])
{body}
def test_never_run(): raise AssertionError
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            "@pytest.mark.parametrize('x', range(1 + RANK))\ndef test_it(x): pass",
            [
                "ERROR: pytest inside a launch: the ranks have collected different tests:",
                "  only rank 1: *::test_it[[]1[]]",
            ],
            id="other_items",
        ),
        pytest.param(
            "@pytest.mark.parametrize('x', [0, 1] if RANK else [1, 0])\ndef test_it(x): pass",
            ["*the ranks have their tests in different orders: as number 1 rank 0 has *[[]1[]], rank 1 has *[[]0[]]"],
            id="another_order",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "if RANK == 1: raise OSError('no such disk')",
            ["*not all ranks have the same errors of collection. rank 0: none; rank 1: test_launch.py: *no such disk"],
            id="an_error_on_one",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_ranks_that_collect_different_tests_run_nothing(body: str, expected: list[str], torchrun: Torchrun) -> None:
    run = torchrun(COLLECTED.format(body=body))
    show(run.out, *expected)
    assert not run.reports
    assert run.code == 1, run.out
    assert codes(run) == {0: 4, 1: 4}


@pytest.mark.nightly
def test_a_rank_that_ends_during_collection_is_reported(torchrun: Torchrun) -> None:
    # Before pytest has begun on rank 0, torchrun ends it without a word.
    body = (
        "import pathlib, time\nhere = pathlib.Path('rank 0 is here')\nRANK == 0 and here.touch()\n"
        "while not here.exists(): time.sleep(0.01)\nRANK == 0 or os._exit(3)"
    )
    run = torchrun(COLLECTED.format(body=body))
    show(run.out, "ERROR: pytest inside a launch: rank 1 ended before it had collected its tests")
    assert run.code == 1, run.out
    assert codes(run) == {0: 4, 1: 3}


def test_xdist_inside_a_launch_is_a_usage_error(torchrun: Torchrun) -> None:
    run = torchrun("def test(): pass", "-n", "2")
    message = "its ranks cannot share tests out with xdist; leave out -n and --dist"
    show(run.out, f"*ERROR: pytest inside a launch: {message}")
    assert run.code == 1
