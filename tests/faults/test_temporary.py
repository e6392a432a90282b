"""Temporary directories of processes that were killed: the next process that makes one removes them, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.conftest import Start

from pytest_distcompat.launch.temporary import OwnedDirectory, temporary_root

OWNER = """
import time
from pytest_distcompat.launch.temporary import OwnedDirectory
mine = OwnedDirectory()
print(mine.path, flush=True)
time.sleep(600)
"""
#: Ends by a signal while it starts the launcher process, as a node agent that its session refuses.
INTERRUPTED = """
import os
import signal
import subprocess
import sys
from pytest_distcompat.launch.request import Warmth
from pytest_distcompat.launch.warm import WarmLauncher

def end(number, frame):
    raise OSError("ended")

def start(*args, **keywords):
    os.kill(os.getpid(), int(sys.argv[1]))

signal.signal(int(sys.argv[1]), end)
subprocess.Popen = start
WarmLauncher(Warmth()).warm_up()
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files, of this process and of those that it starts; with a short name, as sockets need it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


@pytest.fixture
def owner(temporary: Path) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """Another process's directory, and what ends that process by a signal."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None

    def end(number: int) -> None:
        process.send_signal(number)
        process.wait()

    yield Path(process.stdout.readline().strip()), end
    end(signal.SIGKILL)
    process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_directories_of_dead_processes_are_removed(
    temporary: Path, owner: tuple[Path, Callable[[int], None]], number: int
) -> None:
    path, end = owner
    (path / "sub").mkdir()
    end(number)
    assert path.exists()
    mine = OwnedDirectory()
    assert list(temporary.iterdir()) == [mine.path]
    mine.remove()
    assert not list(temporary.iterdir())


def test_directories_of_living_processes_stay(owner: tuple[Path, Callable[[int], None]]) -> None:
    path, _ = owner
    OwnedDirectory().remove()
    assert path.exists()


def test_a_directory_without_owner_stays(temporary: Path) -> None:
    (temporary / "distcompat-leases-0").mkdir()
    (temporary / "distcompat-file").touch()
    OwnedDirectory().remove()
    assert {path.name for path in temporary.iterdir()} == {"distcompat-leases-0", "distcompat-file"}


def test_a_fork_of_its_owner_does_not_remove_it(temporary: Path) -> None:
    mine = OwnedDirectory()
    child = os.fork()
    if not child:
        mine.remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert mine.path.exists()
    mine.remove()
    assert not mine.path.exists()


def test_a_directory_that_is_left_to_the_user_stays(temporary: Path) -> None:
    mine = OwnedDirectory("train")
    assert mine.path.name.startswith("distcompat-train-")
    mine.leave()
    mine.remove()
    OwnedDirectory().remove()
    assert [path.name for path in temporary.iterdir()] == [mine.path.name]
    assert not list(mine.path.iterdir())


def test_a_named_directory_is_removed_wherever_it_is(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is too long for sockets is not for other directories."""
    long = temporary / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    script = OWNER.replace("OwnedDirectory()", "OwnedDirectory('train')").replace("time.sleep(600)", "os._exit(1)")
    environment = {**os.environ, "TMPDIR": str(long)}
    done = subprocess.run(
        [sys.executable, "-c", f"import os{script}"], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert [str(path) for path in long.iterdir()] == [done.stdout.strip()]
    OwnedDirectory("other").remove()
    assert not list(long.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_directory_of_an_interrupted_start_is_left(temporary: Path, number: int) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(number)], check=False, capture_output=True, text=True)
    assert "OSError: ended" in done.stderr
    assert not list(temporary.iterdir())


LONG = """
import multiprocessing.util
import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.distcompat(world_size=2)
def test_it(number):
    # What a test asks for is what its user has set.
    assert tempfile.gettempdir() == os.environ["TMPDIR"]
    assert len(tempfile.gettempdir()) > 107
    # The worker hands its tensors over by a socket.
    assert torch.cat(list(DataLoader(torch.arange(4), num_workers=1))).tolist() == [0, 1, 2, 3]
    Path("sockets").write_text(multiprocessing.util.get_temp_dir(), encoding="utf-8")
"""


@pytest.mark.nightly
@pytest.mark.spawn
@pytest.mark.parametrize("args", [(), ("--distcompat-reuse=session",)], ids=["fresh", "reused"])
def test_a_directory_with_a_long_name_is_used_for_all_but_sockets(start: Start, args: tuple[str, ...]) -> None:
    done = start(LONG, *args, name="of-job-" + "1" * 100).finish()
    assert done.outcomes == {"test_it[1]": "passed", "test_it[2]": "passed"}, done.out
    assert not done.leftovers
    assert not Path((done.directory / "sockets").read_text(encoding="utf-8")).exists()


@pytest.mark.parametrize(("length", "writable", "short"), [(51, True, False), (52, True, True), (52, False, False)])
def test_sockets_go_where_their_names_have_room(
    monkeypatch: pytest.MonkeyPatch, length: int, writable: bool, short: bool
) -> None:
    # 103 bytes, of which "/distcompat-xxxxxxxx/pymp-xxxxxxxx/listener-xxxxxxxx" takes 52.
    usual = "/" + "d" * (length - 1)
    monkeypatch.setattr("tempfile.tempdir", usual)
    monkeypatch.setattr("os.access", lambda *_: writable)
    assert str(temporary_root()) == ("/tmp" if short else usual)


#: Between two tests with ranks, another one removes what the first had made.
CLEANED = """
import os, pathlib, shutil, sys, tempfile
import pytest

marked = pytest.mark.distcompat(world_size=2, reuse={reuse!r})

@marked
def test_before(rank): pass

def test_cleans(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    # A random name may begin with any letter.
    made = set(pathlib.Path(tempfile.gettempdir()).glob("distcompat-*"))
    launchers = made - set(pathlib.Path(tempfile.gettempdir()).glob("distcompat-leases-*"))
    assert launchers
    if {what!r} == "base":
        shutil.rmtree(base)
    for launcher in launchers:
        if {what!r} == "launcher":
            shutil.rmtree(launcher)
        elif {what!r} == "files":
            for path in [*launcher.rglob("*")]:
                if not path.is_dir():
                    path.unlink()

@marked
def test_after(rank): pass

@marked
def test_fails(rank): assert rank == 5
"""


@pytest.mark.spawn
@pytest.mark.parametrize("reuse", ["never", pytest.param("module", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "what",
    [
        "launcher",
        pytest.param("base", marks=pytest.mark.nightly),
        pytest.param("files", marks=pytest.mark.nightly),
    ],
)
def test_a_cleaner_between_two_tests_changes_no_verdict(what: str, reuse: str, temporary: Path) -> None:
    tests = temporary / "test_cleaned.py"
    tests.write_text(CLEANED.format(what=what, reuse=reuse), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider", "-rA", tests.name]
    done = subprocess.run(command, cwd=temporary, stdout=subprocess.PIPE, text=True, check=False)
    ended = {
        line.split()[1].partition("::")[2]: line.split()[0]
        for line in done.stdout.splitlines()
        if line[:6] in {"PASSED", "FAILED"}
    }
    expected = {"test_before": "PASSED", "test_cleans": "PASSED", "test_after": "PASSED", "test_fails": "FAILED"}
    assert ended == expected, done.stdout
    assert "assert 0 == 5" in done.stdout or "assert 1 == 5" in done.stdout
    assert set(temporary.glob("distcompat-*")) == set(temporary.glob("distcompat-leases-*"))
