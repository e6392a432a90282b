"""Sessions whose runs share a GPU, since the user says how many ranks may: xdist workers do not wait for each other."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat import lease as lease_package
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.request import Request
from pytest_distcompat.lease import Inventory, Pool, Span, entries, read_timeline
from pytest_distcompat.lease.timeline import Leak, append
from pytest_distcompat.leased import LeasedLauncher
from pytest_distcompat.plugin.packing import Demands, plan
from pytest_distcompat.report.telemetry import with_device_seconds
from pytest_distcompat.report.text import runs_text
from pytest_distcompat.world import World

from .conftest import MadeUpMemory, lease_elsewhere

if TYPE_CHECKING:
    from tests.lease.conftest import RunOnGpus

ONE = ("GPU-a",)
#: Two tests of one rank, and one that starts its rank itself.
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(2))
@pytest.mark.distcompat(world_size=1)
def test(number): pass
"""
LENT = """
import pytest, time

@pytest.mark.parametrize("number", range(2))
@pytest.mark.require_distributed(1)
def test(number): time.sleep(1)
"""
TOGETHER = {f"test[{number}]": {"meets": 2.0} for number in range(2)}
ONE_BY_ONE = {f"test[{number}]": {"seconds": 1.0} for number in range(2)}


def overlap(spans: list[Span]) -> bool:
    """Tell whether two leases were held at the same time."""
    for first, second in itertools.combinations(spans, 2):
        if first.got < second.released and second.got < first.released:
            return True
    return False


@pytest.mark.parametrize(
    ("options", "source", "shares"),
    [
        (["--distcompat-ranks-per-gpu=2"], TESTS, True),
        (["--distcompat-ranks-per-gpu=1"], TESTS, False),
        ([], TESTS, False),
        (["--distcompat-ranks-per-gpu=2", "--distcompat-throughput=0.5"], TESTS, False),
        (["--distcompat-ranks-per-gpu=2"], LENT, False),
    ],
    ids=["two", "one", "auto", "throughput is measured", "tests start ranks themselves"],
)
def test_workers_share_a_gpu_where_the_user_says_how_many_ranks_may(
    options: list[str], source: str, shares: bool, pytester: pytest.Pytester, run_on_gpus: RunOnGpus
) -> None:
    pytest.importorskip("xdist")
    pytester.makeconftest('pytest_plugins = ["pytest_distcompat.aliases"]')
    pytester.makepyfile(test_it=source)
    script = TOGETHER if shares else ONE_BY_ONE
    result = run_on_gpus("-n", "2", "--distcompat-gpus=1", *options, script=script)
    result.assert_outcomes(passed=2)
    first, second = read_timeline(pytester.path / "base" / "distcompat")
    assert overlap([first, second]) == shares
    names = {*first.ids, *second.ids}
    if shares:
        assert names == {"GPU-0.place-1-of-2", "GPU-0.place-2-of-2"}
    else:
        assert names == {"GPU-0"}


def test_the_report_has_a_row_for_each_place(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    pytester.makepyfile(test_it=TESTS)
    run_on_gpus("--distcompat-gpus=1", "--distcompat-ranks-per-gpu=4")
    directory = pytester.path / "base" / "distcompat"
    first, *_ = read_timeline(directory)
    rows = entries(directory, first.asked)
    assert len(rows) == 2
    for entry in rows:
        assert entry["device"] == "GPU-0.place-1-of-4"
        assert entry["part"] == 0.25


@dataclasses.dataclass
class Measured:
    """Stands for a verdict."""

    nodeid: str
    device_seconds: float = 0.0


def test_places_are_parts_of_a_device_in_figures(tmp_path: Path) -> None:
    """A run on one of four places for 8 s used 2 s of the GPU."""
    leak = (Leak("GPU-a", 5, "large"), Leak("GPU-a", 7, "killed before"))
    append(tmp_path, Span(("GPU-a.place-1-of-4",), "small", 1, 0, 0, 8))
    append(tmp_path, Span(("GPU-a.place-2-of-4", "GPU-a.place-3-of-4"), "large", 1, 0, 0, 8, leak))
    rows = entries(tmp_path, 0.0)
    assert [entry["leak"] for entry in rows] == [0, 5, 0]
    verdicts: Any = [Measured("small"), Measured("large")]
    small, large = with_device_seconds(verdicts, rows)
    assert small.device_seconds == 2.0
    assert large.device_seconds == 4.0
    ((text, _),) = next(runs_text([], rows))
    assert text == "devices in use, of 8 s: GPU-a 75%"


class Records(Launcher):
    """Launcher that only notes what it is to run."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def run(self, request: Request) -> Ending:
        self.requests.append(request)
        return Ending((), {})


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("runs_share", "variable"), [(True, "4"), (False, None)])
def test_ranks_are_told_how_many_share_their_gpu(
    ranks: int, runs_share: bool, variable: str | None, tmp_path: Path
) -> None:
    inventory = Inventory("gpu", ONE, 4, runs_share=runs_share)
    pool = Pool(tmp_path / "leases", inventory, memory=lambda ids: {})
    launcher = Records()
    request = Request("a:b", {}, ranks, str(tmp_path))
    LeasedLauncher(launcher, lambda: pool, lambda text: None).run(request)
    assert launcher.requests[0].set.get("DISTCOMPAT_RANKS_PER_GPU") == variable
    assert "DISTCOMPAT_RANKS_PER_GPU" not in os.environ


@pytest.mark.parametrize(
    ("ranks", "visible", "places", "fraction"),
    [
        pytest.param(1, "0", "4", 1 / 4, id="alone, neighbours may come"),
        pytest.param(2, "0", "4", 1 / 4, id="two of four"),
        pytest.param(4, "0,1", "2", 1 / 2, id="two on each"),
        pytest.param(2, "0", None, 1 / 2, id="the whole GPU is the run's"),
        pytest.param(1, "0", None, None, id="the whole GPU is the rank's"),
    ],
)
def test_a_rank_has_its_part_of_the_memory_whoever_its_neighbours_are(
    ranks: int, visible: str, places: str | None, fraction: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a verdict would depend on them."""
    pytest.importorskip("torch")
    set_to: list[tuple[float, int]] = []
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *given: set_to.append(given))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if places is not None:
        monkeypatch.setenv("DISTCOMPAT_RANKS_PER_GPU", places)
    World.from_environment("cuda").divide_memory()
    if fraction is None:
        assert set_to == []
    else:
        assert set_to == [(fraction, 0)]
    assert World.from_environment("cpu").ranks_each == 1


def test_a_leak_is_that_of_the_run_whose_processes_stay(tmp_path: Path, memory: MadeUpMemory) -> None:
    """Two runs share the GPU; each worker knows the memory of its own processes."""
    inventory = Inventory("gpu", ONE, 2, runs_share=True)
    neighbours = MadeUpMemory(dict(memory.now))
    leaky = Pool(tmp_path / "leases", inventory, memory=memory, free_timeout=0)
    clean = Pool(tmp_path / "leases", inventory, memory=neighbours, free_timeout=0)
    with leaky.lease(1, who="leaky") as leaky_lease, lease_elsewhere(clean, 1, "clean") as other:
        memory.now["GPU-a"] += 300 << 20
    assert other.leak == ()
    assert leaky_lease.leak == (Leak("GPU-a", 300 << 20, "leaky"),)


def test_in_a_session_the_test_that_leaked_fails(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(test_it=TESTS)
    script = {"test[0]": {"meets": 2.0, "leaks": 300}, "test[1]": {"meets": 2.0}}
    options = ("--distcompat-gpus=1", "--distcompat-ranks-per-gpu=2")
    result = run_on_gpus("-n", "2", *options, script=script)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["FAILED test_it.py::test[[]0[]] - 300 MiB stayed in use on GPU-0 *"])


@pytest.mark.parametrize(
    ("gpus", "runs_share", "nodes", "devices"),
    [(2, True, 0, 8), (2, False, 0, 2), (2, True, 3, 24)],
)
def test_places_are_what_tests_are_packed_on(
    gpus: int, runs_share: bool, nodes: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[int] = []

    def pack(demands: list[Any], devices: int, workers: int) -> list[Any]:
        packed.append(devices)
        return demands

    monkeypatch.setattr(lease_package, "pack", pack)
    demands = Demands({"test_a.py::test": "demand"}, {"demand": 1}, ordered=False)
    text = json.dumps(dataclasses.asdict(demands))
    ids = ("GPU-a", "GPU-b")[:gpus]
    session: Any = SimpleNamespace(
        shared=lambda name: json.loads(text),
        inventory=Inventory("gpu", ids, 4, runs_share=runs_share),
        placement=SimpleNamespace(machines_of_workers=max(1, nodes)),
        config=None,
    )
    assert plan(session, ["test_a.py::test"], 8) == [[0]]
    assert packed == [devices]
