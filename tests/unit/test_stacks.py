"""Tracebacks and stacks of ranks begin where the user's story does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pytest_distcompat
from pytest_distcompat.launch.forensics.stacks import format_error, without_launcher, without_launcher_in_crash

PACKAGE = Path(pytest_distcompat.__file__).parent


def caller(file: str) -> Callable[[Callable[[], Any]], Any]:
    """A function in that file of this package that calls its argument."""
    namespace: dict[str, Any] = {}
    exec(compile("def call(function): return function()", str(PACKAGE / file), "exec"), namespace)
    call: Callable[[Callable[[], Any]], Any] = namespace["call"]
    return call


def test_a_traceback_begins_at_the_trainer() -> None:
    def in_the_trainer() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        caller("worker.py")(
            lambda: caller("ext/upstream/drivers/torch.py")(lambda: caller("probe/live.py")(in_the_trainer))
        )
    # This test's own frames are above those of the plugin.
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next
    text = format_error(error)
    assert f'"{PACKAGE}/worker.py"' not in text
    assert f'"{PACKAGE}/ext/upstream/drivers/torch.py"' in text
    assert f'"{PACKAGE}/probe/live.py"' in text, "the trainer called it"
    assert text.endswith("ValueError: no\n")


def test_a_traceback_of_the_plugin_alone_keeps_its_last_frame() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        caller("worker.py")(lambda: 1 / 0)
    error = caught.value
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_next is not None
    error.__traceback__ = error.__traceback__.tb_next
    error.__traceback__.tb_next = None
    assert f'"{PACKAGE}/worker.py"' in format_error(error)


def test_a_stack_ends_at_the_trainer() -> None:
    stack = (
        'Thread 0x1 (most recent call first):\n  File "/my/train.py", line 3 in step\n'
        '  File "/x/pytest_distcompat/driver.py", line 9 in train\n  File "/x/pytest_distcompat/worker.py", line 5 in run\n'
    )
    assert without_launcher(stack).splitlines()[1:] == ['  File "/my/train.py", line 3 in step']


THREADS = (
    'Thread 0x3 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 324 in wait\n'
    '  File "/my/loader.py", line 7 in fetch\n'
    "\n"
    'Thread 0x2 (most recent call first):\n  File "/x/pytest_distcompat/worker.py", line 5 in run\n'
    "\n"
    "Thread 0x4 (most recent call first):\n  <no Python frame>\n"
    "\n"
    'Thread 0x1 (most recent call first):\n  File "/my/train.py", line 3 in step\n'
    '  File "/x/pytest_distcompat/launch/rank.py", line 5 in main\n  File "/x/fork.py", line 1 in serve\n'
)


def test_the_main_thread_comes_first_and_empty_ones_not_at_all() -> None:
    assert without_launcher(THREADS).splitlines() == [
        "Thread 0x1 (most recent call first):",
        '  File "/my/train.py", line 3 in step',
        "Thread 0x3 (most recent call first):",
        '  File "/usr/lib/python3.11/threading.py", line 324 in wait',
        '  File "/my/loader.py", line 7 in fetch',
    ]


def test_a_rank_inside_its_callers_alone_keeps_their_frames() -> None:
    stack = 'Thread 0x1 (most recent call first):\n  File "/x/_pytest/capture.py", line 5 in read\n'
    assert without_launcher(stack) == stack.rstrip()


@pytest.mark.parametrize("stack", ["", "Thread 0x1 (most recent call first):\n", "\n\n"])
def test_a_stack_without_frames_is_not_shown(stack: str) -> None:
    assert without_launcher(stack) == ""


def test_a_crash_keeps_the_crashed_thread_first() -> None:
    lines = ["Fatal Python error: Aborted", "", *THREADS.replace("Thread 0x3", "Current thread 0x3").splitlines()]
    shown = without_launcher_in_crash([*lines, "", "Extension modules: numpy (total: 1)"])
    titles = [line for line in shown if line and not line.startswith("  ")]
    assert titles == [
        "Fatal Python error: Aborted",
        "Current thread 0x3 (most recent call first):",
        "Thread 0x1 (most recent call first):",
    ]
