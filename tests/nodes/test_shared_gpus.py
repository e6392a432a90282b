"""A node agent whose scheduler gave a run fewer GPUs than it has ranks there; GPUs and ranks are made up."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_distcompat import devices
from pytest_distcompat.ext.cluster import agent
from pytest_distcompat.ext.cluster.place import Place
from pytest_distcompat.launch import nccl
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.request import Request, Warmth


class Ranks:
    """Stands for the agent's launcher: keeps the request."""

    watch = None

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def run(self, request: Request) -> Ending:
        self.requests.append(request)
        return Ending((), {})


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return an agent on a node with two GPUs, with ``Ranks`` for its launcher."""
    monkeypatch.setattr(devices, "gpu_uuids", lambda: ["GPU-a", "GPU-b"])
    monkeypatch.setattr(agent, "facts", lambda *args: {})
    monkeypatch.setattr(nccl, "environment_of_shared_ranks", lambda: {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    # A part of a run sets the environment of the agent's process.
    before, directory = dict(os.environ), Path.cwd()
    warmth = dataclasses.asdict(Warmth())
    root = str(tmp_path)
    welcome = {
        "cwd": root,
        "root": root,
        "warmth": warmth,
        "device": "cuda",
        "gpus": 2,
        "ranks_each": 2,
        "runs_share": False,
        "timeline": "",
    }
    made: Any = agent._Agent(SimpleNamespace(send=lambda message: None), welcome)  # type: ignore[arg-type]
    made._launcher = Ranks()
    yield made
    os.environ.clear()
    os.environ.update(before)
    os.chdir(directory)


@pytest.mark.parametrize(("world_size", "variable"), [(4, None), (8, "1")])
def test_ranks_of_a_node_that_share_gpus_may(world_size: int, variable: str | None, made: Any, tmp_path: Path) -> None:
    """NCCL would refuse two ranks on each of the node's two GPUs."""
    request = dataclasses.asdict(Request("a:b", {}, world_size, str(tmp_path / "run"), nodes=2))
    place = dataclasses.asdict(Place(1, "127.0.0.1", ("127.0.0.1", 1), "id"))
    part = {"request": request, "place": place, "set": {}, "unset": [], "id": "id", "gpus": ("0", "1")}
    made._part(part)
    (sent,) = made._launcher.requests
    assert sent.set["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert sent.set.get("NCCL_MULTI_RANK_GPU_ENABLE") == variable


@pytest.mark.parametrize(
    ("runs_share", "given", "places"),
    [(True, (), 2), (False, (), 1), (True, ("GPU-a",), 1)],
    ids=["shared", "whole", "given by a scheduler"],
)
def test_runs_of_a_node_share_gpus_that_its_agents_lease(
    runs_share: bool, given: tuple[str, ...], places: int, made: Any
) -> None:
    """Those that a scheduler gave a run are the run's alone."""
    made._welcome["runs_share"] = runs_share
    assert made._pool(given).inventory.places == places
