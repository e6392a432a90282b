"""Temporary directories of processes that were killed: the next process that makes one removes them, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_distcompat.launch.temporary import OwnedDirectory

OWNER = """
import time
from pytest_distcompat.launch.temporary import OwnedDirectory
print(OwnedDirectory().path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, of this process and of those that it starts."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


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
def test_those_of_the_dead_go(temporary: Path, owner: tuple[Path, Callable[[int], None]], number: int) -> None:
    path, end = owner
    (path / "sub").mkdir()
    named = temporary / "pymp-x"
    named.mkdir()
    (path / "temporary").write_text(str(named), encoding="utf-8")
    end(number)
    assert path.exists()
    mine = OwnedDirectory()
    assert list(temporary.iterdir()) == [mine.path]
    mine.remove()
    assert not list(temporary.iterdir())


def test_those_of_the_living_stay(owner: tuple[Path, Callable[[int], None]]) -> None:
    path, _ = owner
    OwnedDirectory().remove()
    assert path.exists()


def test_what_nobody_owns_stays(temporary: Path) -> None:
    (temporary / "distcompat-leases-0").mkdir()
    (temporary / "distcompat-file").touch()
    OwnedDirectory().remove()
    assert {path.name for path in temporary.iterdir()} == {"distcompat-leases-0", "distcompat-file"}


@pytest.mark.parametrize("elsewhere", ["precious", "sub/pymp-x"])
def test_only_a_directory_of_multiprocessing_goes_with_it(temporary: Path, elsewhere: str) -> None:
    named = temporary / elsewhere
    named.mkdir(parents=True)
    mine = OwnedDirectory()
    (mine.path / "temporary").write_text(str(named), encoding="utf-8")
    mine.remove()
    assert named.exists()


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
