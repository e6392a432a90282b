"""How a run asks Ray for its devices, with a Ray that is made up; a real one: tests/machines/test_ray_devices.py."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import devices
from pytest_distcompat.ext.cluster.executors import Asked, Given, _ray_cluster
from pytest_distcompat.ext.cluster.executors import ray as executor
from pytest_distcompat.ext.cluster.pool import ScheduledPool
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.lease import Inventory

NODES = {f"n{number}": {"NodeID": f"id{number}", "Resources": {"GPU": 2.0}} for number in (1, 2)}
ASKED = {"nodes": ["n1", "n2"], "resource": "GPU", "least": 2, "most": 2, "who": "test_{it}"}


class MadeUpRay:
    """A Ray whose placement groups are ready when ``busy`` has been counted down."""

    def __init__(self) -> None:
        self.busy = 0
        self.groups: list[tuple[Any, ...]] = []
        self.removed: list[Any] = []

    def wait(self, seconds: float) -> bool:
        self.busy -= 1
        return self.busy < 0

    def placement_group(self, bundles: Any, strategy: str, bundle_label_selector: Any) -> Any:
        self.groups.append((bundles, strategy, [selector["ray.io/node-id"] for selector in bundle_label_selector]))
        return types.SimpleNamespace(wait=self.wait, bundle_specs=bundles)

    def modules(self) -> dict[str, Any]:
        strategies = types.SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: placement_group_bundle_index
        )
        groups = types.SimpleNamespace(placement_group=self.placement_group, remove_placement_group=self.removed.append)
        ray = types.SimpleNamespace(
            available_resources=lambda: {"GPU": 1.0},
            exceptions=types.SimpleNamespace(RayError=RuntimeError),
            # A task returns which bundle it is in, and how many GPUs it has.
            remote=lambda **options: (
                lambda task: types.SimpleNamespace(
                    remote=lambda: [f"{options['scheduling_strategy']}", f"{options['num_gpus']}"]
                )
            ),
            get=lambda tasks, timeout: tasks,
        )
        names = {"ray": ray, "ray.util": types.SimpleNamespace(), "ray.util.placement_group": groups}
        return {**names, "ray.util.scheduling_strategies": strategies}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MadeUpRay:
    made = MadeUpRay()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(_ray_cluster, "NOTIFY_AFTER_S", 0)
    monkeypatch.setattr(_ray_cluster, "SETTLED_S", 0)
    return made


def answers(asked: dict[str, Any], replaced: Callable[[], bool] = lambda: False) -> list[dict[str, Any]]:
    return list(_ray_cluster.Placements({**NODES, "": NODES["n1"]}, replaced).place(asked))


def test_a_group_is_what_a_run_needs(ray: MadeUpRay) -> None:
    placements = _ray_cluster.Placements({**NODES, "": NODES["n1"]}, lambda: False)
    assert [*placements.place(ASKED)] == [{"given": {"n1": ["0", "2"], "n2": ["1", "2"]}}]
    request = {**ASKED, "nodes": [""], "least": 1, "most": 1}
    assert [*placements.place(request)] == [{"given": {"": ["0", "1"]}}]
    assert len(ray.removed) == 1
    assert [*placements.place({"nodes": []})] == []
    assert len(ray.removed) == 2
    assert ray.groups == [
        ([{"GPU": 2}, {"GPU": 2}], "STRICT_SPREAD", ["id1", "id2"]),
        ([{"GPU": 1}], "STRICT_PACK", ["id1"]),
    ]


def test_a_run_on_cpus_takes_what_there_is(ray: MadeUpRay) -> None:
    assert answers({**ASKED, "resource": "CPU", "least": 0}) == [{"given": {}}]
    # Two of the three ranks share a GPU.
    assert answers({**ASKED, "least": 2, "most": 3}) == [{"given": {"n1": ["0", "2"], "n2": ["1", "2"]}}]


def test_what_never_fits_is_refused(ray: MadeUpRay) -> None:
    (answer,) = answers({**ASKED, "least": 3, "most": 3})
    assert answer == {"refused": "test_{it} needs GPUs (3 on each node); by Ray's count n1 has 2, n2 has 2"}
    assert not ray.groups


WAITS = "test_{it} has waited 0 s for GPUs (2 on n1, 2 on n2); by Ray's count 1 are free in the cluster"


def test_a_run_waits(ray: MadeUpRay) -> None:
    ray.busy = 3
    # It says so once, and not each second.
    notice = "waits for GPUs (2 on n1, 2 on n2); by Ray's count 1 are free"
    waits: list[Any] = [{"waits": notice}, {"waits": ""}, {"waits": ""}]
    assert answers(ASKED) == [*waits, {"given": {"n1": ["0", "2"], "n2": ["1", "2"]}}]


@pytest.mark.parametrize("why", ["limit", "replaced"])
def test_a_run_stops_to_wait(why: str, ray: MadeUpRay, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.busy = 100
    if why == "limit":
        monkeypatch.setattr(_ray_cluster, "DEVICES_S", 0)
    answer = answers(ASKED, lambda: why == "replaced")
    assert answer == [{"refused": WAITS}]
    assert len(ray.removed) == 1


ANSWERS = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "number" in asked and asked["who"] == "ends":
        break
    # The first is of a request that was given up.
    found = [{"number": 0, "given": {"old": []}}, {"waits": "busy"}, {asked["who"]: {"n1": ["0"]}}] if "number" in asked else []
    for answer in found:
        print(json.dumps({"number": asked["number"], **answer}), flush=True)
"""


def test_the_answers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, said = executor.Ray(), list[str]()
    monkeypatch.setattr(executor.Ray, "_popen", staticmethod(popen))
    (process,) = ray.start((), 2, "token")
    with ray.devices(Asked(["n1"], "GPU", 1, 1, "given"), said.append) as given:
        assert given == {"n1": ["0"]}
    with (
        pytest.raises(UsageProblem, match=r"^\{'n1': \['0'\]\}$"),
        ray.devices(Asked([], "GPU", 1, 1, "refused"), said.append),
    ):
        pass
    with pytest.raises(UsageProblem, match=r"^lost$"), ray.devices(Asked([], "GPU", 1, 1, "given"), lost):
        pass
    with pytest.raises(UsageProblem, match=r"has ended$"), ray.devices(Asked([], "GPU", 1, 1, "ends"), said.append):
        pass
    assert said == ["busy", "busy"]
    assert process.wait(10) == 0
    process.communicate()


def lost(text: str) -> None:
    raise UsageProblem("lost")


def popen(command: Any, token: str, *, answers: bool) -> subprocess.Popen[str]:
    assert answers
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", ANSWERS], **pipes)


def test_the_pool_of_pytests_node_leases_what_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_uuids", lambda: ["GPU-a", "GPU-b"])
    monkeypatch.setattr(devices, "mig_instances", list)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    holders = list[str]()

    @contextlib.contextmanager
    def ask(ranks: int, who: str) -> Iterator[Given]:
        holders.append(who)
        yield {"": ["1"]}
        holders.remove(who)

    pool = ScheduledPool(None, Inventory("gpu", ("GPU-a", "GPU-b")), ask=ask, memory=lambda _: {})

    def failing() -> None:
        with pool.lease(1, who="a test") as lease, pool.lease(1, who="its script") as inner:
            assert lease.ids == inner.ids == ("GPU-b",)
            assert holders == ["a test"]
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert not holders
    assert pool.inventory.ids == ("GPU-a", "GPU-b")
