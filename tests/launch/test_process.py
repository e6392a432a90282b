"""Who runs below a process: found without a look at all the other processes of the machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_distcompat.launch import process

#: A process with a thread; each starts a shell, which has a child of its own, and prints its numbers.
TREE = """
import subprocess, sys, threading
def start():
    shell = subprocess.Popen(["sh", "-c", "sleep 60 & echo $$ $!; wait"], stdout=subprocess.PIPE, text=True)
    sys.stdout.write(shell.stdout.readline())
    sys.stdout.flush()
    shell.wait()
threading.Thread(target=start).start()
start()
"""


@pytest.fixture
def tree() -> Iterator[tuple[int, set[int]]]:
    """A process, and the numbers of all below it."""
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        below = {int(number) for _ in range(2) for number in started.stdout.readline().split()}
        try:
            yield started.pid, below
        finally:
            # A shell ends by itself when its child does.
            for pid in (*below, started.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _forbidden(*arguments: Any, **named: Any) -> Any:
    raise AssertionError("that asks every process of the machine")


def test_all_descendants_of_a_process_are_found(tree: tuple[int, set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    top, below = tree
    assert {child.pid for child in psutil.Process(top).children(recursive=True)} == below
    monkeypatch.setattr(psutil.Process, "children", _forbidden)
    assert {descendant.pid for descendant in process.descendants(top)} == below
    assert top in process.children(os.getpid())


def test_descendants_are_found_without_the_kernels_children_file(
    tree: tuple[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    top, below = tree
    monkeypatch.setattr(process, "_CHILDREN_FILE", Path("/proc/no-such-file"))
    assert {descendant.pid for descendant in process.descendants(top)} == below
    with subprocess.Popen(["true"]) as gone:
        pass
    assert process.children(gone.pid) == []


def test_the_dead_are_children_until_they_are_reaped() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    children = process.children(os.getpid())
    assert pid in children
    process.reap_adopted(keep=children)
    assert pid in process.children(os.getpid()), "somebody else waits for it"
    process.reap_adopted(keep=set(children) - {pid})
    assert pid not in process.children(os.getpid())


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_child_is_reaped_though_ctrl_c_came_while_it_was_polled(interrupted: bool) -> None:
    """Seen as a pytest that two Ctrl-C made hang: the first one's cleanup polled, and the second came."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    if interrupted:
        lock: Any = vars(child)["_waitpid_lock"]
        assert lock.acquire(blocking=False)
    process.kill_and_wait(child)
    assert child.returncode == -signal.SIGKILL
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
    # Twice is once.
    process.kill_and_wait(child)
    assert child.stdin is not None
    child.stdin.close()


@pytest.mark.parametrize("file", ["", "nvidiactl", "kfd", "dri/renderD128"])
def test_only_an_accelerator_that_is_there_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    if file:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    answer = process.has_accelerator(tmp_path)
    assert answer == bool(file)
    monkeypatch.setattr(process, "has_accelerator", lambda: answer)
    hiding = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if file else {}
    assert process.on_device({"NAME": "value"}, "cpu") == {"NAME": "value", **hiding}
    assert process.on_device({}, "cuda") == {}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if file else {}
    assert process.user_environment({"NAME": "value"}, "cpu") == {"NAME": "value", **hidden}
    own = {"DS_ACCELERATOR": "xpu"}
    assert process.user_environment(own, "cpu") == {**own, **hidden}
