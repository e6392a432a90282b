"""Descriptions of a change that a test leaves: which variable, thread or handler."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from pytest_distcompat.ext.reuse.differences import described

THREAD = threading.Thread(name="poller")


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ({}, {"FOO": "x"}, " (FOO set to 'x')"),
        ({"FOO": "x", "A": "1"}, {"FOO": "y" * 50}, f" (A removed, FOO set to '{'y' * 39}...)"),
        ({}, dict.fromkeys("abcde", "1"), " (a set to '1', b set to '1', c set to '1' and 2 more)"),
        (set(), {THREAD}, " (poller)"),
        ({THREAD}, set(), " (no more poller)"),
        (["/a"], ["/a", "/b"], " ('/b')"),
        ("/a", "/b", " ('/b' instead of '/a')"),
        (0o22, 0o77, " (63 instead of 18)"),
        ([object()], [object()], ""),
        ((1, 2), (1, 3), ""),
        (None, "spawn", ""),
        ({}, {"FOO": "\udcff"}, " (FOO set to '\\udcff')"),
    ],
)
def test_changes_between_two_states_are_named(was: Any, now: Any, message: str) -> None:
    assert described("it", was, now) == f"it{message}"


def test_items_that_have_names_by_their_place() -> None:
    names = [signal.SIGUSR1.name, signal.SIGTERM.name]
    assert described("signal handlers", [0, 0], [1, 0], names) == "signal handlers (SIGUSR1)"
