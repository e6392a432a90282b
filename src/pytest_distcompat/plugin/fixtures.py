"""Fixtures for tests that run on ranks, and the fixture by which items of suites run.

A test with ``@pytest.mark.distcompat(world_size=2)`` runs on two *ranks*: the processes of a
torchrun process group, in each of which pytest runs the test with these fixtures.
``pytest_configure`` registers this module as a plugin in every session. So in pytest's own process
a fixture such as ``rank`` exists too, and fails with a hint.

The fixture ``distcompat_case`` is for suites, the subclasses of ``CompatSuite``. An item of a suite
is one *check* (a claim) in one *cell*, a configuration such as ``fsdp2-fp32-w2``: strategy,
precision, 2 ranks. It runs in pytest's own process, which starts ranks for it.

The docstrings of fixtures are what ``pytest --fixtures`` shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.plugin.on_ranks.launched import ON_RANK, SHARED, WORLD

if TYPE_CHECKING:
    import torch

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.plugin.suite.run import BoundCase
    from pytest_distcompat.world import World


def _require_rank(request: pytest.FixtureRequest) -> None:
    """Fail the test unless this process is a rank."""
    if ON_RANK not in request.config.stash:
        pytest.fail(
            f"fixture {request.fixturename!r} is for tests that run on ranks; mark the test with "
            "@pytest.mark.distcompat(world_size=2)",
            pytrace=False,
        )


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Cell:
    """Return the cell of this run of the test: strategy, precision, world size, options."""
    from pytest_distcompat.cell import Cell

    param = getattr(request, "param", None)
    if not isinstance(param, Cell):
        pytest.fail(
            "fixture 'cell' needs @pytest.mark.distcompat(strategies=[...]) "
            "or precisions=, options=",
            pytrace=False,
        )
    return param


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """Return this rank's ``World``: ``rank``, ``size``, ``local_rank``, ``device``, ``backend``."""
    _require_rank(request)
    return request.config.stash[WORLD]


@pytest.fixture
def rank(world: World) -> int:
    """Return the number of this rank, from 0."""
    return world.rank


@pytest.fixture
def world_size(world: World) -> int:
    """Return the number of ranks."""
    return world.size


@pytest.fixture
def device(world: World) -> torch.device:
    """Return the device of this rank: its own GPU, or the CPU."""
    import torch

    return torch.device(world.device)


@pytest.fixture
def shared_dir(request: pytest.FixtureRequest) -> Path:
    """Return a directory that all ranks of this test share, empty at its start.

    ``tmp_path`` is each rank's own.
    """
    _require_rank(request)
    directory = request.config.stash[SHARED]
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture
def process_group(request: pytest.FixtureRequest, world: World) -> Iterator[Any]:
    """Initialize the default process group for the test, and destroy it after the test.

    A test whose trainer initializes the group does not use this fixture. A rank that fails does not
    destroy the group, where it would wait for its peers.
    """
    import torch
    from torch import distributed

    if world.device != "cpu":
        torch.cuda.set_device(world.device)
        world.divide_memory()
    group = request.config.hook.pytest_distcompat_process_group(world=world)
    # Ranks that several tests share keep their group, which an extension made.
    if group is not None:
        yield group
        return
    distributed.init_process_group(world.backend)
    if world.backend == "gloo":
        # gloo returns as soon as this rank is connected: it could end before another rank has
        # connected to it.
        distributed.barrier()
    yield distributed.group.WORLD
    # The test may have destroyed it itself.
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def distcompat_case(request: pytest.FixtureRequest) -> BoundCase:
    """Return one check in one cell of a CompatSuite; calling it runs the check."""
    from pytest_distcompat.plugin.suite.cases import NoCell
    from pytest_distcompat.plugin.suite.run import BoundCase

    # A suite without any cell to run has one item, which says why.
    if isinstance(request.param, NoCell):
        pytest.skip(request.param.reason)
    return BoundCase(request.param, request.node)
