"""Fixtures of tests that run on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.plugin.suite.cases import BoundCase
    from pytest_distcompat.world import World


def _on_rank(request: pytest.FixtureRequest) -> None:
    from pytest_distcompat.plugin.inside.rank_session import ON_RANK

    if ON_RANK not in request.config.stash:
        pytest.fail(
            f"fixture {request.fixturename!r} is for tests that run on ranks; mark the test with "
            "@pytest.mark.distcompat(world_size=2)",
            pytrace=False,
        )


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Cell:
    """The cell of this run of the test: strategy, precision, world size, options."""
    from pytest_distcompat.cell import Cell

    found = getattr(request, "param", None)
    if not isinstance(found, Cell):
        pytest.fail(
            "fixture 'cell' needs @pytest.mark.distcompat(strategies=[...]) or precisions=, options=", pytrace=False
        )
    return found


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """Where this rank stands: ``rank``, ``size``, ``local_rank``, ``device``, ``backend``."""
    from pytest_distcompat.plugin.inside.rank_session import WORLD

    _on_rank(request)
    return request.config.stash[WORLD]


@pytest.fixture
def rank(world: World) -> int:
    """This rank's number, from 0."""
    return world.rank


@pytest.fixture
def world_size(world: World) -> int:
    """How many ranks there are."""
    return world.size


@pytest.fixture
def device(world: World) -> torch.device:
    """This rank's device: its own GPU, or the CPU."""
    import torch

    return torch.device(world.device)


@pytest.fixture
def shared_dir(request: pytest.FixtureRequest) -> Path:
    """A directory that all ranks of this test share, empty at its start. ``tmp_path`` is each rank's own."""
    from pytest_distcompat.plugin.inside.rank_session import SHARED

    _on_rank(request)
    directory = request.config.stash[SHARED]
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture
def process_group(world: World) -> Iterator[Any]:
    """The default process group, initialised for the test and destroyed after it.

    A test that lets its trainer initialise the group does not ask for this fixture. A rank that fails never gets to the
    destruction, in which it would wait for its peers.
    """
    import torch
    from torch import distributed

    from pytest_distcompat.launch import serving

    if world.device != "cpu":
        torch.cuda.set_device(world.device)
    if serving.kept is not None:
        # One group for all tests that these ranks run.
        yield serving.kept.process_group(world.backend)
        return
    distributed.init_process_group(world.backend)
    if world.backend == "gloo":
        # A rank that is connected to all may be done, and gone, before another one is.
        distributed.barrier()
    yield distributed.group.WORLD
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def distcompat_case(request: pytest.FixtureRequest) -> BoundCase:
    """One check in one cell of a CompatSuite, to be called."""
    from pytest_distcompat.plugin.suite.cases import BoundCase

    return BoundCase(request.param, request.node)
