"""A test's changes end with its processes; the next test starts like a rank of torchrun."""

from __future__ import annotations

import json
import multiprocessing
import socket
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.faults.conftest import RunFaults
    from tests.faults.runs import Run

pytestmark = [pytest.mark.spawn, pytest.mark.nightly]

SEEDED = """
import random
import numpy, pytest, torch
torch.manual_seed(3), numpy.random.seed(3), random.seed(3)

@pytest.mark.distcompat(world_size=2)
@pytest.mark.parametrize("number", range(2))
def test_seeded(rank, number):
    assert torch.initial_seed() == 3
    found = torch.rand(1).item(), numpy.random.rand(), random.random()
    torch.manual_seed(3), numpy.random.seed(3), random.seed(3)
    assert found == (torch.rand(1).item(), numpy.random.rand(), random.random())
"""

PATCHED = """
import copy, json, os, pathlib, time
from unittest import mock
import pytest

mark = pytest.mark.distcompat(world_size=2)

def patched(*args):
    raise RuntimeError("the test's own")

@pytest.fixture
def patch(monkeypatch):
    monkeypatch.setattr(time, "monotonic", patched)
    monkeypatch.setattr(time, "sleep", patched)

@mark
def test_patched_clock(patch):
    pass

@mark
def test_patched_clock_fails(patch, rank):
    assert rank == 0

@mark
def test_patched_clock_skips(patch):
    pytest.skip("no need")

@mark
def test_emptied_environment():
    os.environ.clear()

@pytest.mark.distcompat(world_size=2, reuse="never")
def test_patched_clock_stays():
    time.monotonic = time.sleep = patched

PATCHES = {
    "dumps an object": (json, "dumps", lambda *args, **more: "{}"),
    "dumps a list": (json, "dumps", lambda *args, **more: "[1]"),
    "dumps a mock": (json, "dumps", mock.MagicMock()),
    "loads": (json, "loads", lambda *args, **more: {}),
    "read_text": (pathlib.Path, "read_text", lambda *args, **more: "{}"),
    "write": (os, "write", lambda *args: None),
    "os.open": (os, "open", patched),
    "os.close": (os, "close", patched),
    "getpid": (os, "getpid", lambda: 1),
    "_exit": (os, "_exit", lambda code: None),
    "deepcopy": (copy, "deepcopy", patched),
}

@pytest.fixture(params=PATCHES)
def by_its_own(request, monkeypatch):
    monkeypatch.setattr(*PATCHES[request.param])

@mark
def test_passes(by_its_own):
    pass

@mark
def test_fails(by_its_own, rank):
    assert rank == 0

@mark
def test_skips(by_its_own):
    pytest.skip("no need")

@pytest.mark.distcompat(world_size=2, reuse="never")
def test_stays():
    json.dumps, json.loads, pathlib.Path.read_text = patched, patched, patched
    os.write = os.open = os.getpid = patched
"""
#: What each of these tests replaces, until its teardown.
PATCHES = (
    *("dumps an object", "dumps a list", "dumps a mock", "loads", "read_text", "write", "os.open", "os.close"),
    *("getpid", "_exit", "deepcopy"),
)


REUSE = "--distcompat-reuse=session"
#: Changes of ``change`` in faults_state.py that the report names so; its other changes are not compared.
NAMED_CHANGES = (
    *(
        "the environment",
        "the working directory",
        "the file mode mask",
        "sys.path",
        "signal handlers",
        "blocked signals",
    ),
    *("timers", "threads", "garbage collection", "the interpreter's settings", "the locale", "builtins, os or time"),
    *("logging", "sys.excepthook", "torch's global flags", "numpy's settings", "accelerate's singletons"),
    *("DeepSpeed's communication", "the process group"),
)


@pytest.fixture(scope="module", params=[(), pytest.param((REUSE,), marks=pytest.mark.nightly)], ids=["fresh", "reused"])
def ranks(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return whether each test has fresh ranks, or shares those of the previous test if it left nothing."""
    parameter: tuple[str, ...] = request.param
    return parameter


@pytest.fixture(scope="module")
def run(run_faults: RunFaults, ranks: tuple[str, ...]) -> Run:
    return run_faults("faults_state.py", "--distcompat-timeout=60", *ranks)


@pytest.fixture(scope="module")
def seeded(run_faults: RunFaults) -> Run:
    return run_faults(SEEDED)


def state(run: Run, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run.properties(name)["state"])
    return content


def drawn(run: Run) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.properties("test_random")["drawn"].splitlines()]


def test_every_test_but_the_failing_one_passes(run: Run) -> None:
    assert {name for name, end in run.outcomes.items() if end != "passed"} == {"test_changes_and_fails"}, run.out


def test_everything_was_changed(run: Run) -> None:
    before, changed = state(run, "test_before"), state(run, "test_changes")
    same = {name for name in before if before[name] == changed[name]}
    # The core limit is 0 on many machines; one thread more is torch's to refuse.
    assert same <= {"limits", "torch threads", "numpy"}


@pytest.mark.parametrize("name", ["test_after", "test_after_the_failure"])
def test_changes_do_not_reach_the_next_test(name: str, run: Run) -> None:
    assert state(run, name) == state(run, "test_before")


@pytest.mark.parametrize("ranks", [(REUSE,)], ids=["reused"], indirect=True)
def test_shared_ranks_with_changed_state_end_and_say_why(run: Run) -> None:
    why = run.properties("test_changes")["distcompat: ranks left"]
    assert " it left " in why, why
    assert {name for name in NAMED_CHANGES if name not in why} == set(), why
    # Nothing else ended them: neither what only looks, nor a group of the test's own.
    properties = [run.properties(name) for name in ("test_well", "test_before", "test_after", "test_random")]
    assert not [prop["distcompat: ranks left"] for prop in properties if "distcompat: ranks left" in prop]


def test_changes_do_not_reach_the_parent(run: Run) -> None:
    assert run.properties("test_of_the_parent_before") == run.properties("test_of_the_parent_after")


@pytest.mark.parametrize("name", ["random", "numpy", "torch"])
def test_ranks_draw_different_numbers_unless_they_seed(name: str, run: Run) -> None:
    first, second = drawn(run)
    assert first[name] != second[name]


@pytest.mark.parametrize("args", [(), pytest.param((REUSE,), marks=pytest.mark.nightly)], ids=["fresh", "reused"])
def test_a_seed_at_import_holds_on_all_ranks(args: tuple[str, ...], run_faults: RunFaults) -> None:
    run = run_faults(SEEDED, *args)
    assert run.outcomes == {"test_seeded[0]": "passed", "test_seeded[1]": "passed"}, run.out


def test_processes_of_a_rank_start_as_those_of_any_script(run: Run) -> None:
    assert run.properties("test_start_method")["method"] == multiprocessing.get_start_method()


@pytest.mark.nightly
def test_ports_that_others_have_taken(run_faults: RunFaults) -> None:
    source = """
import pytest

@pytest.mark.distcompat(world_size=2)
def test_well(process_group):
    from torch import distributed
    distributed.barrier()
"""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = run_faults(source, MASTER_ADDR="localhost", MASTER_PORT=port)
    assert run.outcomes == {"test_well": "passed"}, run.out
    assert not run.leftovers


@pytest.mark.nightly
def test_patches_of_a_test_do_not_reach_its_report(run_faults: RunFaults) -> None:
    run = run_faults(PATCHED)
    ends = {"test_patched_clock_fails": "failed", "test_patched_clock_skips": "skipped"}
    names = ("", "_fails", "_skips", "_stays")
    expected = {f"test_patched_clock{name}": "passed" for name in names}
    expected |= dict.fromkeys(("test_emptied_environment", "test_stays"), "passed")
    for name, end in (("passes", "passed"), ("fails", "failed"), ("skips", "skipped")):
        ends |= {f"test_{name}[{patch}]": end for patch in PATCHES}
    assert run.outcomes == expected | ends, run.out
    for patch in PATCHES:
        run.shows(f"test_fails[{patch}]", "rank 1 failed: assert 1 == 0")
    run.shows("test_patched_clock_fails", "rank 1 failed: assert 1 == 0")


def test_no_process_file_or_lease_remains(run: Run, seeded: Run) -> None:
    for suite_run in (run, seeded):
        assert suite_run.shares_ranks or not suite_run.leftovers_by_test
        assert not suite_run.leftovers
