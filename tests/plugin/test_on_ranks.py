"""Fixtures, parameters, capture and marks work on every rank, and a failure there is reported here."""

from __future__ import annotations

import functools
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.plugin.conftest import Run, RunPytest

pytestmark = pytest.mark.spawn

CONFTEST = """
import os
import pytest

@pytest.fixture(scope="session")
def of_session():
    yield os.getpid()
    with open("events.txt", "a") as file:
        file.write(f"{os.getpid()} session fixture down\\n")

@pytest.fixture(autouse=True)
def auto(request):
    request.node.auto = os.getpid()
"""
#: How those end that do not pass.
ENDS = {
    "skipped": ["test_skip", "test_skipif", "test_skipif_for_others", "test_importorskip"],
    "xfailed": ["test_xfail_raises", "test_xfail_on_one_rank", "test_xfail_by_rank", "test_xfail_called"],
    "xpassed": ["test_xpass"],
    "failed": [
        "test_xfail_raises_another",
        "test_xfail_did_not_raise",
        "test_xpass_strict",
        "test_xpass_strict_added",
        "test_xpass_strict_until_its_teardown",
        "test_xfail_and_killed",
        "test_xfail_and_hangs",
        "test_assertion",
        "test_odd_id_fails[it's $HOME/a::b]",
        "test_peer_in_a_collective",
        "test_disagree",
        "test_killed",
        "test_segfault",
        "test_hangs",
        "test_setup_raises",
        "test_teardown_raises",
        "test_unknown_fixture",
        "test_cell_without_cells",
        "test_exits",
        "test_only_in_the_parent",
    ],
}
#: What the text of a failure shows, in this order.
TEXTS: dict[str, list[str]] = {
    "test_xfail_raises_another": ["rank * failed: KeyError: 'another'"],
    "test_xfail_did_not_raise": ["rank * failed: Failed: DID NOT RAISE*ValueError*"],
    "test_xpass_strict": ["[[]XPASS(strict)[]] known"],
    "test_xpass_strict_added": ["[[]XPASS(strict)[]] added"],
    "test_xpass_strict_until_its_teardown": ["[[]XPASS(strict)[]] known"],
    "test_xfail_and_killed": ["--- rank 1: was killed by SIGKILL ---"],
    "test_xfail_and_hangs": ["time limit of 0.7 s: ranks 0, 1 are in test_xfail_and_hangs at test_fail.py:*"],
    "test_assertion": [
        "rank 1 failed: AssertionError: assert {'rank': 1} == {'rank': 0}",
        "--- rank 1: failed: AssertionError: assert {'rank': 1} == {'rank': 0} ---",
        ">       assert value == {*rank*: 0}",
        "E         Differing items:",
        "E         {'rank': 1} != {'rank': 0}",
        "test_fail.py:*: AssertionError",
        "consequences:",
        "  rank 0 was killed by SIGTERM after it had finished its work",
        "reproduce: pytest test_fail.py::test_assertion --distcompat-reuse=*",
        "this run alone: torchrun *--nproc-per-node 2 -m pytest_distcompat.launch.rank *request.json*",
    ],
    "test_peer_in_a_collective": ["rank 1 failed: ValueError: the cause", "consequences:", "  rank 0 *"],
    "test_disagree": ["rank 1 skipped (only me) while other ranks went on", "*test_fail.py:*: Skipped: only me"],
    # On a busy machine it may not have started yet.
    "test_killed": ["rank 1 was killed by SIGKILL", "consequences:", "  rank 0 *SIGTERM*"],
    "test_segfault": [
        "rank 1 was killed by SIGSEGV",
        "last output:",
        "Fatal Python error: Segmentation fault",
        "  File *test_fail.py*, line * in test_segfault",
    ],
    "test_hangs": ["time limit of 0.7 s: rank*0*rank 1*"],
    "test_setup_raises": [
        "rank * failed in setup: RuntimeError: on the way up",
        "*def raises_up*",
        "E       RuntimeError*",
    ],
    "test_teardown_raises": ["rank * failed in teardown: RuntimeError: on the way down", "E       RuntimeError*"],
    "test_unknown_fixture": ["rank * failed in setup: fixture 'no_such_fixture' not found"],
    "test_cell_without_cells": ["rank * failed in setup: *fixture 'cell' needs @pytest.mark.distcompat(strategies=*"],
    "test_exits": ["rank * failed: SystemExit: 0"],
    "test_only_in_the_parent": [
        "rank * raised LookupError: *no item *parent' (*Collection must not depend on the process*"
    ],
}


def copy(directory: Path) -> Path:
    for source, name in (("on_ranks.py", "test_all.py"), ("on_ranks_fail.py", "test_fail.py")):
        shutil.copy(Path(__file__).with_name(source), directory / name)
    (directory / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def run_with(run_pytest: RunPytest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Both files, run once for each way to share ranks: in random order a parameter comes and goes."""

    @functools.cache
    def run(reuse: str) -> Run:
        directory = copy(tmp_path_factory.mktemp("on_ranks"))
        return run_pytest(directory, "--junitxml=junit.xml", f"--distcompat-reuse={reuse}")

    return run


@pytest.fixture(
    scope="module",
    params=["never", *(pytest.param(reuse, marks=pytest.mark.nightly) for reuse in ("module", "session"))],
)
def run(run_with: Callable[[str], Run], request: pytest.FixtureRequest) -> Run:
    """With ranks of their own for each test, and with ranks that tests share."""
    return run_with(request.param)


def show(text: str, *lines: str) -> None:
    pytest.LineMatcher(text.splitlines()).fnmatch_lines(lines)


def test_every_test_has_its_expected_outcome(run: Run) -> None:
    assert run.code == pytest.ExitCode.TESTS_FAILED, run.out
    expected = {name: end for end, names in ENDS.items() for name in names}
    assert {name: end for name, end in run.outcomes.items() if end != "passed"} == expected, run.out
    assert len(run.outcomes) - len(expected) == 29


@pytest.mark.parametrize("name", TEXTS)
def test_a_failure_shows_its_report(name: str, run: Run) -> None:
    text = run.text(name)
    show(text, *TEXTS[name])
    # Nothing of ours but the rank's main.
    assert "plugin/marked/" not in text


def test_a_hang_shows_where_each_rank_is(run: Run) -> None:
    text = run.text("test_hangs")
    stacks = {part[0]: part for part in text.split("--- rank ")[1:]}
    assert "in test_hangs" in stacks["0"]
    assert "in barrier" in stacks["1"]
    assert "in test_hangs" in stacks["1"]


def test_output_is_shown_per_rank(run: Run) -> None:
    for name in ("test_prints", "test_assertion"):
        for rank in range(2):
            assert run.sections(name)[f"Captured stdout call (rank {rank})"] == f"printed by {rank}\n"
    assert "logged by 1" in run.sections("test_prints")["Captured log call (rank 1)"]


def test_properties_and_messages_reach_junit_xml(run: Run) -> None:
    cases = {case.get("name"): case for case in ET.parse(run.directory / "junit.xml").getroot().iter("testcase")}
    assert len(cases) == len(run.outcomes)
    properties = [(p.get("name"), p.get("value")) for p in cases["test_property"].iter("property")]
    assert [(name, value) for name, value in properties if "distcompat" not in str(name)] == [
        ("of rank", "0"),
        ("shape", "(2, 3)"),
        ("no text", "NoText, whose text cannot be made: OSError"),
        ("of rank (rank 1)", "1"),
    ]
    failure = cases["test_killed"].find("failure")
    assert failure is not None
    assert failure.get("message", "").startswith("rank 1 was killed by SIGKILL")


def test_ordinary_tests_keep_their_process_and_their_fixtures(run: Run) -> None:
    pid = dict(run.of("test_unmarked_first")["properties"])["pid"]
    lines = (run.directory / "events.txt").read_text(encoding="utf-8").splitlines()
    events = [line.split(maxsplit=1) for line in lines]
    assert [event for who, event in events if who == str(pid)] == [
        "module fixture up",
        "class fixture up",
        "class fixture down",
        "module fixture down",
        "module down",
    ]
    assert "skipif started ranks" not in {event for _, event in events}
    of_ranks = [(who, event) for who, event in events if who != str(pid)]
    down = [who for who, event in of_ranks if event == "session fixture down"]
    assert len(down) == len(set(down)) == 2
    for who in down:
        # Each rank tears down what it set up, in pytest's order.
        assert [event for other, event in of_ranks if other == who] == [
            "module fixture up",
            "class fixture up",
            "function fixture down",
            "class fixture down",
            "module fixture down",
            "module down",
            "session fixture down",
        ]


@pytest.mark.nightly
def test_the_reproduce_command_shows_the_same_failure(
    run: Run, run_command: Callable[[str, Path], tuple[int, str]]
) -> None:
    name = "test_odd_id_fails[it's $HOME/a::b]"
    code, out = run_command(run.command(name, "reproduce"), run.directory)
    assert code == pytest.ExitCode.TESTS_FAILED
    show(out, "collected 1 item", "*ValueError: it's $HOME/a::b on rank 1*", "*= 1 failed in *")


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.nightly)], ids=["alone", "xdist"])
def test_the_reproduce_command_has_the_settings_that_were_named(
    workers: tuple[str, ...], run_pytest: RunPytest, run_command: Callable[[str, Path], tuple[int, str]], tmp_path: Path
) -> None:
    (tmp_path / "of ci").mkdir()
    (tmp_path / "of ci" / "pytest.ini").write_text(
        "[pytest]\ndistcompat_world_size = 3\npython_functions = check_*\n", encoding="utf-8"
    )
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n@pytest.mark.distcompat(strategies=['ddp'])\n"
        "def check_it(rank, pytestconfig): assert not pytestconfig.getini('xfail_strict')\n",
        encoding="utf-8",
    )
    settings = ("-c", "of ci/pytest.ini", "--rootdir=.", "-o", "xfail_strict=true", "-vW", "ignore:a b")
    run = run_pytest(tmp_path, "test_it.py", *settings, *workers)
    assert run.outcomes == {"check_it[ddp-fp32-w3]": "failed"}, run.out
    code, out = run_command(run.command("check_it[ddp-fp32-w3]", "reproduce"), tmp_path)
    assert code == pytest.ExitCode.TESTS_FAILED, out
    show(out, "collected 1 item", "rank ? failed: *", "*-W 'ignore:a b'*", "*= 1 failed in *")


@pytest.mark.nightly
def test_the_run_alone_shows_the_same_failure(
    run: Run, run_command: Callable[[str, Path], tuple[int, str]], tmp_path: Path
) -> None:
    code, out = run_command(run.command("test_peer_in_a_collective", "this run alone"), tmp_path)
    assert code == 1
    show(out, "*ValueError: the cause*")


@pytest.mark.nightly
def test_the_run_alone_begins_as_the_test_did(
    run_pytest: RunPytest, run_command: Callable[[str, Path], tuple[int, str]], tmp_path: Path
) -> None:
    """A test that creates files in the shared directory finds none of an earlier test."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.distcompat(world_size=2)\n"
        "def test_it(process_group, shared_dir, rank):\n"
        "    process_group.barrier().wait()\n"
        "    (shared_dir / f'of-{rank}').mkdir()\n"
        "    process_group.barrier().wait()\n"
        "    assert len(list(shared_dir.iterdir())) == 3, 'the cause'\n",
        encoding="utf-8",
    )
    run = run_pytest(tmp_path, "test_it.py")
    assert run.outcomes == {"test_it": "failed"}, run.out
    for _ in range(2):
        code, out = run_command(run.command("test_it", "this run alone"), tmp_path)
        assert code == 1
        show(out, "rank ?: failed: AssertionError: the cause*")


@pytest.mark.nightly
def test_known_issues_are_those_of_all_ranks_together(run_pytest: RunPytest, tmp_path: Path) -> None:
    """A rank that weighed itself would miss what it is declared to fail by, or hide from the parent that it was excused."""
    (tmp_path / "known.toml").write_text(
        "version = 1\n[[issue]]\ntest = 'test_one'\nmatch = 'of one'\nreason = 'org/repo#1'\n"
        "[[issue]]\ntest = 'test_both'\nmatch = 'of both'\nreason = 'org/repo#2'\n",
        encoding="utf-8",
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\npytestmark = pytest.mark.distcompat(world_size=2)\n"
        "def test_one(rank):\n    if rank == 1: raise ValueError('of one')\n"
        "def test_both(): raise ValueError('of both')\n",
        encoding="utf-8",
    )
    result = run_pytest(tmp_path, "--distcompat-known=known.toml")
    assert result.code == 0, result.out
    assert result.outcomes == {"test_one": "xfailed", "test_both": "xfailed"}, result.out
    assert "remove me" not in result.out
    show(result.text("test_one"), "rank 1 failed: ValueError: of one")
    assert "declared to fail" not in result.text("test_one")


@pytest.mark.nightly
def test_a_plugin_that_the_fork_server_imported_early_is_no_error(run_pytest: RunPytest, tmp_path: Path) -> None:
    """pytest warns of a plugin that it comes too late to rewrite, which some projects take for an error."""
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = -p torch.version\nfilterwarnings = error::pytest.PytestWarning\n", encoding="utf-8"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.distcompat(world_size=1)\ndef test_it():\n    pass\n", encoding="utf-8"
    )
    result = run_pytest(tmp_path)
    assert result.code == pytest.ExitCode.OK, result.out


@pytest.mark.nightly
@pytest.mark.parametrize("reuse", ["never", pytest.param("session", marks=pytest.mark.nightly)])
def test_modules_of_the_plugin_are_imported_before_the_fork(run_pytest: RunPytest, tmp_path: Path, reuse: str) -> None:
    """Each rank did, with rewritten asserts, which a busy machine takes half a second for."""
    (tmp_path / "conftest.py").write_text(
        "import sys\nseen = sys.modules.setdefault('seen_in_the_server', set())\n"
        "def pytest_collection_finish(session):\n    seen.update(sys.modules)\n",
        encoding="utf-8",
    )
    (tmp_path / "test_it.py").write_text(
        "import sys\nimport pytest\n\n"
        "@pytest.mark.distcompat(world_size=2)\ndef test_it(process_group, shared_dir):\n"
        "    late = set(sys.modules) - sys.modules['seen_in_the_server']\n"
        "    assert not [name for name in late if name.startswith('pytest_distcompat')]\n",
        encoding="utf-8",
    )
    result = run_pytest(tmp_path, f"--distcompat-reuse={reuse}")
    assert result.code == pytest.ExitCode.OK, result.out


@pytest.mark.nightly
@pytest.mark.parametrize(
    "place", ["trainer", *(pytest.param(place, marks=pytest.mark.nightly) for place in ("conftest", "test_it"))]
)
def test_modules_that_read_the_rank_at_import(run_pytest: RunPytest, tmp_path: Path, place: str) -> None:
    """Imported by the fork server, such a module reads that it is alone; the work of two ranks then passed as that of one."""
    asks = "import os\nRANK, SIZE = int(os.environ.get('RANK', 0)), int(os.getenv('WORLD_SIZE', 1))\n"
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n", encoding="utf-8")
    (tmp_path / "test_it.py").write_text(
        f"{asks if place == 'test_it' else f'from {place} import RANK, SIZE'}\nimport pytest\n\n"
        "@pytest.mark.distcompat(world_size=2)\ndef test_it(rank):\n    assert (RANK, SIZE) == (rank, 2)\n",
        encoding="utf-8",
    )
    if place != "test_it":
        (tmp_path / f"{place}.py").write_text(asks, encoding="utf-8")
    result = run_pytest(tmp_path)
    assert result.outcomes == {"test_it": "passed"}, result.out
    message = (
        f"each rank imports the tests itself, as under torchrun, which takes longer: {tmp_path / place}.py:2 reads "
    )
    assert result.out.count(message) == 1, result.out


@pytest.mark.nightly
def test_ranks_that_train_import_nothing_for_it(run_pytest: RunPytest, tmp_path: Path) -> None:
    """The first optimizer of a process, and DistributedDataParallel, import torch._dynamo: a second of every rank of every test.

    Ranks get such modules from the process that they are forked from, so that no code of them is executed.
    """
    (tmp_path / "test_it.py").write_text(
        "from importlib.machinery import SourceFileLoader\n"
        "import pytest, torch\nfrom torch.nn.parallel import DistributedDataParallel\n\n"
        "@pytest.mark.distcompat(world_size=2)\ndef test_it(process_group, monkeypatch):\n"
        "    executed = []\n"
        "    execute = SourceFileLoader.exec_module\n"
        "    def count_and_execute(loader, module):\n"
        "        executed.append(module.__name__)\n"
        "        execute(loader, module)\n"
        "    monkeypatch.setattr(SourceFileLoader, 'exec_module', count_and_execute)\n"
        "    model = DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "    optimizer = torch.optim.AdamW(model.parameters())\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        "    assert set(executed) <= {'torch.profiler._cupti_monitor'}\n",
        encoding="utf-8",
    )
    result = run_pytest(tmp_path)
    assert result.code == pytest.ExitCode.OK, result.out
