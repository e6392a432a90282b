"""The fork server: every run has fresh processes, nothing unfit is forked from, nothing piles up."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.launch.conftest import notes

from pytest_distcompat.events import pids_of
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.forking import LOGS
from pytest_distcompat.launch.process import kill, sweep_shared_memory
from pytest_distcompat.launch.request import Warmth
from pytest_distcompat.launch.warm import WarmLauncher

if TYPE_CHECKING:
    from tests.launch.conftest import Run

pytestmark = pytest.mark.spawn

PRELOADED = """
import os, threading

def start_thread(payload):
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def start_thread_as_jemalloc_does(payload):
    # As pyarrow does when it is imported: unless its own variable forbids it, or if another library has the same allocator.
    import ctypes
    asked = os.environ.get("JE_ARROW_MALLOC_CONF", "") if payload["asks"] else ""
    if "background_thread:false" not in asked.split(","):
        def wait():
            ctypes.CDLL(None).prctl(15, b"jemalloc_bg_thd")  # PR_SET_NAME
            named.set()
            threading.Event().wait()
        named = threading.Event()
        threading.Thread(target=wait, daemon=True).start()
        named.wait()

def fail(payload):
    raise LookupError("no " + payload["what"])

def leave(payload):
    raise SystemExit(3)

def die(payload):
    os._exit(3)

def multiply(payload):
    import numpy
    square = numpy.ones((512, 512))
    square @ square
"""

Launch = Callable[[Warmth], WarmLauncher]


@pytest.fixture
def launch(importable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Launchers of this test, whose fork servers can import ``preloaded``."""
    (tmp_path / "preloaded.py").write_text(PRELOADED, encoding="utf-8")
    (tmp_path / "with_cuda.py").write_text("import torch\ntorch.cuda.is_initialized = lambda: True\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}")
    launchers = []

    def launch(warmth: Warmth) -> WarmLauncher:
        launchers.append(WarmLauncher(warmth))
        return launchers[-1]

    yield launch
    for launcher in launchers:
        launcher.close()


def pids(ending: Ending) -> list[int]:
    assert ending.kind == "ok", ending.text()
    return list(pids_of(ending.events).values())


def forked(launcher: WarmLauncher, ending: Ending, *, collected: bool = False) -> bool:
    """Return whether the ranks came from a fork server, and from one that has collected tests."""
    # A server that has collected tests is a fork of one that has not.
    generation = 1 if collected else 0
    launcher_process = process_of(launcher)
    for event in report_process(ending):
        server = psutil.Process(event["parent"])
        if server.parents()[generation] != launcher_process:
            return False
    return True


def process_of(launcher: WarmLauncher) -> psutil.Process:
    """Return the launcher process."""
    assert launcher._process is not None
    return psutil.Process(launcher._process._process.pid)


def report_process(ending: Ending) -> list[Mapping[str, Any]]:
    return notes(ending, "seen")


def test_every_run_has_fresh_processes(run: Run) -> None:
    first = run("touch")
    second = run("touch")
    assert len({*pids(first), *pids(second)}) == 4
    for ending in (first, second):
        for before in notes(ending, "before"):
            assert before["touched"] is False
            assert before["attribute"] is False
            assert before["variable"] is None


def test_the_fork_server_stays_safe_to_fork(run: Run, warm: WarmLauncher) -> None:
    ending = run("report_process", 4)
    assert ending.kind == "ok", ending.text()
    assert forked(warm, ending)
    assert not ending.notice
    for seen in report_process(ending):
        assert not seen["cuda"]
        assert not seen["forked_after_cuda"]
        assert psutil.Process(seen["parent"]).num_threads() == 1


@pytest.mark.nightly
def test_heavy_modules_keep_the_fork_server_safe_to_fork(run: Run, launch: Launch) -> None:
    launcher = launch(Warmth(modules=("accelerate", "transformers", "deepspeed")))
    ending = run("report_process", launcher=launcher)
    assert ending.kind == "ok", ending.text()
    assert ending.notice == ""
    assert launcher._process is not None
    assert launcher._process.status is not None
    assert launcher._process.status["unfit"] == ""
    assert forked(launcher, ending)
    assert psutil.Process(report_process(ending)[0]["parent"]).num_threads() == 1


def test_one_fork_server_is_a_fork_of_the_launcher_process(run: Run, launch: Launch) -> None:
    """As another interpreter it would import torch a third time."""
    launcher = launch(Warmth())
    ending = run("report_process", launcher=launcher)
    assert forked(launcher, ending), ending.text()
    first, second = report_process(ending)
    command_line = process_of(launcher).cmdline()
    assert psutil.Process(first["parent"]).cmdline() == command_line
    assert psutil.Process(second["parent"]).cmdline() != command_line


def test_ranks_have_hash_seeds_and_addresses_of_their_own(run: Run, launch: Launch) -> None:
    """So have the ranks of the next run, and those of one that goes on from another whatever came between."""
    launcher = launch(Warmth())
    runs = []
    for turn in (None, None, 0, 1):
        ending = run("report_process", 3, launcher=launcher, turn=turn)
        runs.append(report_process(ending))
    for name in ("hash", "address"):
        for first_rank, second_rank, third_rank in runs:
            assert first_rank[name] != second_rank[name]
            assert second_rank[name] != third_rank[name]
        assert_ranks_differ(runs[0], runs[1], name)
        assert_ranks_differ(runs[2], runs[3], name)


def assert_ranks_differ(run: list[Mapping[str, Any]], next_run: list[Mapping[str, Any]], name: str) -> None:
    """Check that each rank has another value in the next run."""
    for rank, same_rank in zip(run, next_run, strict=True):
        assert rank[name] != same_rank[name]


@pytest.mark.nightly
def test_a_hash_seed_that_the_user_set_is_that_of_all(
    run: Run, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    first, second = report_process(run("report_process", launcher=launch(Warmth())))
    assert first["hash"] == second["hash"]
    assert first["address"] != second["address"]


@pytest.mark.parametrize("thresholds", [(9000, 9, 9), pytest.param((), marks=pytest.mark.nightly)])
def test_ranks_collect_garbage_as_the_libraries_have_set_it(
    run: Run, launch: Launch, tmp_path: Path, thresholds: tuple[int, ...]
) -> None:
    setting = f"import gc\ngc.set_threshold(*{thresholds})\n" if thresholds else ""
    (tmp_path / "collects.py").write_text(setting, encoding="utf-8")
    ending = run("report_process", 1, launcher=launch(Warmth(("collects",))))
    expected = thresholds or gc.get_threshold()
    (note,) = report_process(ending)
    assert note["collection"] == [True, *expected]


@pytest.mark.nightly
def test_a_large_product_keeps_the_fork_server_safe_to_fork(
    run: Run, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that numpy was asked for went at the fork, and come again: nobody in that module started one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    launcher = launch(Warmth(call="preloaded:multiply"))
    ending = run("report_process", launcher=launcher, collected="test_it.py")
    assert not ending.notice
    assert forked(launcher, ending, collected=True), ending.text()


@pytest.mark.nightly
def test_tests_whose_import_starts_a_thread_are_imported_on_ranks(run: Run, launch: Launch) -> None:
    launcher = launch(Warmth(call="preloaded:start_thread"))
    first = run("report_process", 1, launcher=launcher, collected="test_it.py")
    assert first.kind == "ok", first.text()
    assert forked(launcher, first)
    assert "each rank imports the tests itself, as under torchrun" in first.notice
    assert "it started 1 thread, which does not survive a fork" in first.notice
    second = run("report_process", 1, launcher=launcher, collected="test_it.py")
    assert not second.notice, "it is reported once"


@pytest.mark.nightly
def test_a_server_unsafe_to_fork_spawns_ranks_and_says_so_once(run: Run, launch: Launch) -> None:
    launcher = launch(Warmth(modules=("with_cuda",)))
    first = run("report_process", 1, launcher=launcher)
    assert first.kind == "ok", first.text()
    assert not forked(launcher, first)
    assert "it initialised CUDA, which does not survive a fork" in first.notice
    assert "Ranks are started by spawn instead" in first.notice
    # Spawned ranks are our launcher's own children, and die as they do under the fork server.
    second = run("act", launcher=launcher, acts={"0": "child", "1": "SIGKILL"})
    assert not second.notice
    assert second.headline() == "rank 1 was killed by SIGKILL"
    assert len(second.left_over) == 1


@pytest.mark.nightly
def test_a_thread_of_pyarrow_is_kept_from_the_fork_server(
    run: Run, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else the user asks of its allocator."""
    monkeypatch.setenv("JE_ARROW_MALLOC_CONF", "narenas:1")
    launcher = launch(Warmth(call="preloaded:start_thread_as_jemalloc_does", payload={"asks": True}))
    ending = run("report_process", launcher=launcher, collected="test_it.py")
    assert not ending.notice
    assert forked(launcher, ending, collected=True), ending.text()


@pytest.mark.nightly
def test_the_thread_of_a_library_is_named(run: Run, launch: Launch) -> None:
    launcher = launch(Warmth(call="preloaded:start_thread_as_jemalloc_does", payload={"asks": False}))
    ending = run("report_process", 1, launcher=launcher, collected="test_it.py")
    message = "it started 1 thread of jemalloc (pyarrow has one of its own), which does not survive a fork"
    assert message in ending.notice


@pytest.mark.nightly
def test_a_fork_server_that_nothing_is_forked_from_may_die(run: Run, launch: Launch) -> None:
    launcher = launch(Warmth(modules=("with_cuda",)))
    assert run("report_process", 1, launcher=launcher).kind == "ok"
    process = launcher._process
    children = process_of(launcher).children()
    kill(child for child in children if "resource_tracker" not in " ".join(child.cmdline()))
    ending = run("report_process", 1, launcher=launcher)
    assert ending.kind == "ok", ending.text()
    assert launcher._process is process, "another one would import all of it again, for nothing"


@pytest.mark.nightly
@pytest.mark.parametrize("call", ["preloaded:fail", pytest.param("preloaded:leave", marks=pytest.mark.nightly)])
def test_a_preload_that_fails_does_not_keep_ranks_from_starting(run: Run, launch: Launch, call: str) -> None:
    launcher = launch(Warmth(modules=("no_such_module",), call=call, payload={"what": "luck"}))
    ending = run("report_process", launcher=launcher)
    assert ending.kind == "ok", ending.text()
    assert forked(launcher, ending)
    assert launcher._process is not None
    words = {"fail": "LookupError: no luck", "leave": "SystemExit: 3"}
    log = (launcher._process.directory / LOGS[0]).read_text(encoding="utf-8")
    assert words[call.partition(":")[2]] in log


@pytest.mark.nightly
def test_a_preload_that_dies_is_reported(run: Run, launch: Launch) -> None:
    launcher = launch(Warmth(call="preloaded:die"))
    ending = run("report_process", 1, launcher=launcher, collected="test_it.py")
    assert ending.kind == "ok", ending.text()
    assert "it died while it imported" in ending.notice
    # The launcher process is good for more runs, from the servers that are left.
    assert launcher._process is not None
    assert launcher._process.intact


@pytest.mark.nightly
def test_thirty_runs_leave_nothing_behind(run: Run, launch: Launch) -> None:
    launcher = launch(Warmth())
    semaphores: set[Path] = set()
    for number in range(30):
        ending = run("report_process", launcher=launcher)
        assert ending.kind == "ok", ending.text()
        for seen in report_process(ending):
            semaphores.update(map(Path, seen["semaphores"]))
        if number == 5:
            early = resources(launcher)
    late = resources(launcher)
    # Some slack for what waits for the garbage collector.
    for before, after in zip(early, late, strict=True):
        assert after <= before + 2, (early, late)
    # The last run's may wait for the garbage collector too.
    assert semaphores
    assert len(existing(semaphores)) <= 5
    launcher.close()
    assert existing(semaphores) == []


def resources(launcher: WarmLauncher) -> list[int]:
    """Return how many files and threads are open here, in the launcher process and below it."""
    launcher_process = process_of(launcher)
    below = launcher_process.children(recursive=True)
    counts = [
        psutil.Process().num_fds(),
        launcher_process.num_fds(),
        launcher_process.num_threads(),
        len(below),
    ]
    for process in below:
        counts.append(process.num_fds())
    return counts


def existing(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if path.exists()]


def test_closing_leaves_no_process_and_no_file(run: Run, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = launch(Warmth())
    launcher.close()
    # A short one: the path of a socket must not have more than 107 characters.
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("TMPDIR", directory)
        for ready in (False, True):
            launcher.warm_up()
            if ready:
                assert run("meet", launcher=launcher).kind == "ok"
            process = process_of(launcher)
            below = process.children(recursive=True)
            launcher.close()
            launcher.close()
            assert not process.is_running()
            _, still = psutil.wait_procs(below, timeout=10)
            assert not still
            assert not list(Path(directory).iterdir())


@pytest.mark.nightly
@pytest.mark.parametrize("act", ["SIGKILL", "ValueError", "sleep"])
def test_files_by_which_torch_shares_tensors_go_too(
    act: str, run: Run, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launch(Warmth(modules=("torch", "torch.multiprocessing")))
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("TMPDIR", directory)
        ending = run("share_files", launcher=launcher, timeout=5.0, acts={"0": "sleep", "1": act})
        assert not ending.left_over
        launcher.close()
        for shared in notes(ending, "shared"):
            assert shared["names"], ending.text()
            for name in shared["names"]:
                assert not Path("/dev/shm", name).exists()
        assert not list(Path(directory).glob("torch-shm-dir-*"))


@pytest.fixture
def shared_memory() -> Iterator[Callable[[str], Path]]:
    """Make empty files in /dev/shm, and remove them."""
    files = []

    def make(name: str) -> Path:
        path = Path("/dev/shm") / name
        files.append(path)
        path.touch()
        return path

    yield make
    for path in files:
        path.unlink(missing_ok=True)


def test_only_shared_memory_of_this_run_is_swept(shared_memory: Callable[[str], Path]) -> None:
    uid = os.getuid()
    port = 987654321
    ours = [
        shared_memory(f"deepspeed_allreduce_buffer_{uid}_127.0.0.1_{port}_0"),
        shared_memory(f"deepspeed_allreduce_buffer_{uid}_127.0.0.1_{port}_1"),
        shared_memory(f"deepspeed_allreduce_buffer_1_{uid}_127.0.0.1_{port}_0"),
        shared_memory(f"deepspeed_allreduce_buffer_1_{uid}_127.0.0.1_{port}_1"),
    ]
    others = [
        shared_memory(f"deepspeed_allreduce_buffer_{uid}_127.0.0.1_{port + 1}_0"),
        shared_memory(f"deepspeed_allreduce_buffer_{uid + 1}_127.0.0.1_{port}_0"),
        shared_memory(f"deepspeed_allreduce_buffer_{uid}_127.0.0.1_{port}_2"),
        shared_memory(f"deepspeed_allreduce_buffer_{uid}_127.0.0.1_{port}_10"),
        shared_memory(f"other_{uid}_127.0.0.1_{port}_0"),
    ]
    sweep_shared_memory(range(2), port)
    assert existing(ours) == []
    assert existing(others) == others
