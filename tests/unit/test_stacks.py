"""Tracebacks and stacks of ranks begin where the user's story does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pytest_distcompat
from pytest_distcompat.launch.stacks import format_error, without_launcher

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
        caller("worker.py")(lambda: caller("drivers/torch.py")(lambda: caller("probe/live.py")(in_the_trainer)))
    # This test's own frames are above those of the plugin.
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next
    text = format_error(error)
    assert f'"{PACKAGE}/worker.py"' not in text
    assert f'"{PACKAGE}/drivers/torch.py"' in text
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
