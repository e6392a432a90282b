"""Ranks that share a GPU divide its memory, also those whose trainer opens CUDA in its own time."""

from __future__ import annotations

import pytest

from pytest_distcompat import world as module
from pytest_distcompat.world import World

torch = pytest.importorskip("torch")


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """Return what the parts of memory were set to: (part, GPU)."""
    set_to: list[tuple[float, int]] = []
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *given: set_to.append(given))
    # What waits for CUDA in this process stays as it is.
    monkeypatch.setattr("torch.cuda._queued_calls", [])
    module._divide_once_used.cache_clear()
    return set_to


def open_cuda() -> None:
    """Call what waits for CUDA, as torch does when it opens CUDA."""
    for function, _ in torch.cuda._queued_calls:
        function()


@pytest.mark.parametrize(
    ("shared", "ranks_each", "expected"), [(True, 3, [(1 / 3, 1)]), (False, 3, [(1 / 3, 1)]), (False, 1, [])]
)
def test_memory_is_divided_once_cuda_is_opened(
    shared: bool, ranks_each: int, expected: list[tuple[float, int]], fractions: list[tuple[float, int]]
) -> None:
    """To divide it at once would open CUDA in ranks that may never use it, or that fork before they do."""
    world = World(3, 5, 1, "cuda:1", shared, True, ranks_each)
    world.divide_memory_once_used(torch)
    world.divide_memory_once_used(torch)
    assert not fractions
    open_cuda()
    assert fractions == expected


def test_a_test_that_opened_cuda_has_its_part_at_once(
    fractions: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    World(1, 2, 0, "cuda:0", True, True, 2).divide_memory_once_used(torch)
    assert fractions == [(1 / 2, 0)]


CONFTEST = """
import dataclasses
from pytest_distcompat.world import World

read = World.from_environment

def shared(device):
    return dataclasses.replace(read(device), shared={shared}, ranks_each=2)

World.from_environment = shared
"""

#: The second test is run by the same ranks.
WITHOUT_FIXTURE = """
import pytest

pytestmark = pytest.mark.distcompat(world_size=2, reuse="module")

def waiting():
    import torch
    return [function for function, _ in torch.cuda._queued_calls if function.__name__ == "divide_memory"]

def test_first(): assert len(waiting()) == 1

def test_second(): assert len(waiting()) == 1
"""


@pytest.mark.spawn
@pytest.mark.parametrize(
    "shared",
    [
        pytest.param(True, id="with its peer"),
        pytest.param(False, id="with other runs", marks=pytest.mark.nightly),
    ],
)
def test_a_marked_test_divides_memory_without_our_process_group(shared: bool, pytester: pytest.Pytester) -> None:
    """Its trainer makes the group; a rank could take the whole GPU then."""
    pytester.makeconftest(CONFTEST.format(shared=shared))
    pytester.makepyfile(test_it=WITHOUT_FIXTURE)
    result = pytester.runpytest_subprocess("-p", "no:randomly", "--distcompat-gpus=0", "--basetemp=base")
    result.assert_outcomes(passed=2)
