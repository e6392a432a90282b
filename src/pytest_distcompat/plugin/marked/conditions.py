"""Conditions of ``skipif`` and ``xfail`` marks that only a rank can evaluate: texts that ask which rank they are on."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_MARKS = ("skipif", "xfail")


def leave_to_ranks(item: pytest.Function) -> None:
    """Hide from pytest here the marks of an item whose conditions ask for a rank's variables: here each would be taken for unset.

    The ranks evaluate all marks.
    """
    hidden = [mark for mark in item.iter_markers() if mark.name in _MARKS and any(map(_asks(item), _texts(mark)))]
    if not hidden:
        return
    found = item.iter_markers_with_node

    def iter_markers_with_node(name: str | None = None) -> Iterator[tuple[Any, pytest.Mark]]:
        return ((node, mark) for node, mark in found(name) if not any(mark is one for one in hidden))

    vars(item)["iter_markers_with_node"] = iter_markers_with_node


def _texts(mark: pytest.Mark) -> list[str]:
    conditions = (mark.kwargs["condition"],) if "condition" in mark.kwargs else mark.args
    return [condition for condition in conditions if isinstance(condition, str)]


def _asks(item: pytest.Function) -> Any:
    """Return what tells whether a condition asks for such a variable, evaluated with the names that pytest gives it.

    https://docs.pytest.org/en/stable/historical-notes.html#conditions-as-strings-instead-of-booleans
    """
    names: dict[str, Any] = {"os": os, "sys": sys, "platform": platform, "config": item.config}
    for more in reversed(item.ihook.pytest_markeval_namespace(config=item.config)):
        names |= more
    names |= item.function.__globals__

    from pytest_distcompat.launch.at_import import environment_read
    from pytest_distcompat.launch.environment import OF_THE_AGENT

    def asks(condition: str) -> bool:
        read: list[str] = []
        # What is wrong with it, pytest or a rank tells.
        with environment_read(lambda name, _: read.append(name)), contextlib.suppress(Exception):
            eval(condition, dict(names))  # noqa: S307 - as pytest does
        return any(OF_THE_AGENT.fullmatch(name) for name in read)

    return asks
