"""Conditions of ``skipif`` and ``xfail`` marks that only a rank can evaluate: strings that read a rank's variables."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_MARKS = ("skipif", "xfail")


def hide_conditions_of_ranks(item: pytest.Function) -> None:
    """Hide marks whose conditions read a rank's variables from pytest in this process, where these are not set.

    The ranks evaluate all marks.
    """
    hidden = [
        mark
        for mark in item.iter_markers()
        if mark.name in _MARKS and any(map(_rank_variable_test(item), _conditions(mark)))
    ]
    if not hidden:
        return
    original = item.iter_markers_with_node

    def iter_markers_with_node(name: str | None = None) -> Iterator[tuple[Any, pytest.Mark]]:
        return ((node, mark) for node, mark in original(name) if not any(mark is other for other in hidden))

    vars(item)["iter_markers_with_node"] = iter_markers_with_node


def _conditions(mark: pytest.Mark) -> list[str]:
    conditions = (mark.kwargs["condition"],) if "condition" in mark.kwargs else mark.args
    return [condition for condition in conditions if isinstance(condition, str)]


def _rank_variable_test(item: pytest.Function) -> Any:
    """Return a function that returns whether a condition reads a variable of a rank.

    It evaluates the condition with the names that pytest gives it.
    https://docs.pytest.org/en/stable/historical-notes.html#conditions-as-strings-instead-of-booleans
    """
    names: dict[str, Any] = {"os": os, "sys": sys, "platform": platform, "config": item.config}
    for more in reversed(item.ihook.pytest_markeval_namespace(config=item.config)):
        names |= more
    names |= item.function.__globals__

    from pytest_distcompat.launch.at_import import environment_read
    from pytest_distcompat.launch.environment import OF_THE_AGENT

    def reads_rank_variable(condition: str) -> bool:
        variables: list[str] = []
        # pytest or a rank reports a condition that raises.
        with environment_read(lambda name, _: variables.append(name)), contextlib.suppress(Exception):
            eval(condition, dict(names))  # noqa: S307 - as pytest does
        return any(OF_THE_AGENT.fullmatch(name) for name in variables)

    return reads_rank_variable
