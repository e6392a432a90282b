"""The conftest.py of a run whose ranks live on: each fault comes between two tests that pass, which have as many ranks.

So ranks have done a test, with a process group, before they do the faulty one. Which processes did which is written down.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.faults.faults_group import meet


def neighbour(process_group: Any) -> None:
    meet()


@pytest.hookimpl(trylast=True)  # once others have been left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    by_size: dict[int, list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("distcompat")
        assert mark is not None
        by_size[mark.kwargs["world_size"]].append(item)
    items.clear()
    for size, tests in by_size.items():
        number = 0
        for item in tests:
            if item.name == "test_well_after_all":
                items.append(between(item.parent, size, number))
            elif item.name != "test_well":
                items.append(between(item.parent, size, number))
                number += 1
            items.append(item)


def between(module: Any, size: int, number: int) -> pytest.Item:
    name = f"test_neighbour[{size}-{number}]"
    item: pytest.Item = pytest.Function.from_parent(module, name=name, callobj=neighbour)
    item.add_marker(pytest.mark.distcompat(world_size=size))
    return item


@pytest.fixture(autouse=True)
def _processes(request: pytest.FixtureRequest, rank: int) -> None:
    """First of all fixtures: a line that says which process this test is in, on this rank."""
    entry = {"name": request.node.nodeid.partition("::")[2], "rank": rank, "process": os.getpid()}
    with Path(os.environ["RECORDED_REPORTS"]).with_name("processes.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(entry)}\n")
