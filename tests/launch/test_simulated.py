"""Simulations: what they record is what real ranks record, and the same checks are red."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import find_check
from pytest_distcompat.cost import tensor_bytes
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.engine import local_runner
from pytest_distcompat.ext.simulation.fake_ranks import fake_ranks
from pytest_distcompat.ext.simulation.launcher import SimulatingLauncher
from pytest_distcompat.ext.simulation.sent import sent_bytes
from pytest_distcompat.ext.simulation.status import SIMULATED
from pytest_distcompat.judge import judge
from pytest_distcompat.launch.request import Request
from pytest_distcompat.probe.meshes import alike_ranks
from pytest_distcompat.runner import Runner
from pytest_distcompat.scenario import Run, Scenario
from pytest_distcompat.status import Status
from pytest_distcompat.trace import RunTrace, Snapshot, Trace

pytestmark = pytest.mark.spawn

SHORT = Scenario("short", (Run("train", ("build_model", "build", "step", "step", "step")),))


def simulated(store: Path, driver: str, cell: Cell) -> Trace:
    return Runner(store, SimulatingLauncher(), device="cpu", timeout=300).trace(driver, cell, SHORT)


def facts(built: Snapshot, trained: Snapshot) -> dict[str, Any]:
    """What a rank holds and sends, without values; under the coordinates of that rank."""
    assert built.model is not None
    return {
        "parameters": [dataclasses.replace(info, digest="") for info in built.parameters],
        "wrappers": built.model.wrappers,
        "units": built.model.units,
        "states": sorted(
            (state.owner, state.key, state.dtype, state.numel, str(state.layout)) for state in trained.states
        ),
        "steps": [(step.master, step.gradient, step.state, step.holders) for step in trained.steps],
        "compute": set(trained.compute),
        # An operator without ranks, such as ``wait_tensor``, sends nothing.
        "collectives": sorted(str(collective) for collective in trained.collectives if collective.ranks),
    }


def of_rank(run: RunTrace, rank: int) -> dict[str, Any]:
    built, trained = (
        next(snapshot for snapshot in snapshots if snapshot.rank == rank)
        for snapshots in (run.at("build"), run.trained)
    )
    return facts(built, trained)


def sizes(snapshot: Snapshot) -> list[tuple[str, int]]:
    return [(info.name, info.local_numel) for info in snapshot.parameters]


@pytest.mark.parametrize(
    "cell",
    [
        # Of odd sizes: shards are uneven, and some are empty.
        "fsdp2-fp32-w4-model_mlp",
        *(
            pytest.param(cell, marks=pytest.mark.nightly)
            for cell in (
                "fsdp2-bf16_upcast-w4-tp_2",
                "fsdp2-fp32-w8-model_mlp",
                "fsdp2-fp32-w8-dp_replicate_2-tp_2",
                "fsdp2-bf16_upcast-w8-dp_replicate_2",
                "fsdp2-fp32-w4-model_mlp-ema",
            )
        ),
    ],
)
def test_it_records_what_real_ranks_record(tmp_path: Path, cell: str) -> None:
    asked = Cell.parse(cell)
    with local_runner(find_driver("torch"), [asked], device="cpu", store=tmp_path / "real") as runner:
        real = runner.trace("torch", asked, SHORT).run()
    recorded = simulated(tmp_path / "simulated", "torch", asked).run()
    assert (real.end, recorded.end) == (None, None)
    assert recorded.unwrapped is not None
    assert real.unwrapped is not None
    assert [parameter.name for parameter in recorded.unwrapped.parameters] == [
        parameter.name for parameter in real.unwrapped.parameters
    ]
    for snapshot in recorded.at("build"):
        assert of_rank(recorded, snapshot.rank) == of_rank(real, snapshot.rank), f"rank {snapshot.rank}"
        for rank in snapshot.ranks:
            assert sizes(snapshot) == sizes(real.at("build")[rank]), f"rank {snapshot.rank} stands for {rank}"
    assert tensor_bytes(recorded) == tensor_bytes(real)
    assert {rank for snapshot in recorded.at("build") for rank in snapshot.ranks} == set(range(asked.world_size))


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of the broken drivers."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return "simulated_twins"


@pytest.mark.parametrize(
    ("twin", "cell", "check", "finding"),
    [
        pytest.param(
            "RootOnly", "fsdp2-fp32-w8", "units", "FSDP's units are the root; expected", marks=pytest.mark.nightly
        ),
        pytest.param(
            "WholeLayers",
            "fsdp2-fp32-w64-tp_2",
            "active",
            "layers are whole on each rank; expected 2 parts",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "LowMasters",
            "fsdp2-bf16_upcast-w64",
            "dtypes",
            "trainable parameters are stored in bfloat16",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "UnevenReplicas",
            "fsdp2-fp32-w64-dp_replicate_2",
            "active",
            "shards are in 1 copies (all ranks); expected 2",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_mistake_is_red_without_values(
    tmp_path: Path, twins: str, twin: str, cell: str, *, check: str, finding: str
) -> None:
    trace = simulated(tmp_path, f"{twins}:{twin}", Cell.parse(cell))
    verdict = judge(find_check(check), Cell.parse(cell), trace)
    assert (verdict.status, finding in verdict.message) == (Status.FAILED, True), verdict.message


@pytest.mark.nightly
@pytest.mark.parametrize("size", [64, 1024])
def test_a_sound_trainer_at_many_ranks_is_simulated_and_never_passes(tmp_path: Path, size: int) -> None:
    cell = Cell.parse(f"fsdp2-fp32-w{size}-dp_replicate_2-tp_2")
    trace = simulated(tmp_path, "torch", cell)
    verdicts = {name: judge(find_check(name), cell, trace) for name in ("active", "names", "dtypes", "units", "memory")}
    assert {verdict.status for verdict in verdicts.values()} == {SIMULATED}, verdicts
    assert not any(verdict.ok or verdict.red for verdict in verdicts.values())
    assert verdicts["active"].reason == "simulated: no values were computed"
    sent = {(sending["collective"], sending["mesh"], sending["ranks"]) for sending in sent_bytes(trace.run())}
    assert {("all_gather", "dp_shard", size // 4), ("reduce_scatter", "dp_shard", size // 4)} <= sent
    assert {("all_reduce", "dp_replicate", 2), ("all_reduce", "tp", 2)} <= sent
    # Few ranks differ: each size of layer ends at another one.
    assert len(trace.run().at("build")) < 16


def test_ranks_without_a_part_of_a_short_parameter_have_one_empty_tensor() -> None:
    """``fully_shard`` makes one for each: for the parameters of 128 experts on 1024 ranks, that took most of the time."""
    with fake_ranks(0, 64):
        weight, other = torch.zeros(8, 4), torch.zeros(8, 4)
        first = torch.chunk(weight, 64)[0]
        assert first.new_empty(0) is first.new_empty(0)
        assert first.new_empty(0).shape == (0,)
        assert first.new_empty(1) is not first.new_empty(1)
        assert other.new_empty(0) is not other.new_empty(0)


def test_ranks_of_another_mesh_of_the_same_shape_hold_as_much() -> None:
    """A norm beside tensor parallelism is on the data-parallel mesh of its own ``tp`` coordinate."""
    with fake_ranks(0, 8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        norms = {name: distribute_tensor(torch.zeros(7), mesh[name], [Shard(0)]) for name in ("dp", "tp")}
        ranks_by_name = {name: alike_ranks([norm], 8) for name, norm in norms.items()}
    # Of seven elements four ranks have 2, 2, 2 and 1, and two ranks 4 and 3; the last rank is by itself.
    assert ranks_by_name == {"dp": [(0, 1, 2, 3, 4, 5), (6,), (7,)], "tp": [(0, 2, 4, 6), (1, 3, 5), (7,)]}


@pytest.mark.nightly
def test_an_exception_names_the_rank_and_the_action(tmp_path: Path) -> None:
    cell = Cell.parse("fsdp2-fp32-w8-model_mlp-ep_2")
    end = simulated(tmp_path, "torch", cell).run().end
    assert end is not None
    assert (end.kind, end.rank, end.action) == ("raised", 0, "build")


@pytest.mark.nightly
@pytest.mark.parametrize("cell", ["fsdp2-fp32-w4-model_odd", "fsdp2-fp32-w8-tp_4"])
def test_what_real_ranks_cannot_do_fails_in_the_same_way(tmp_path: Path, cell: str) -> None:
    """An empty parameter, and fewer heads of attention than parts of a layer."""
    asked = Cell.parse(cell)
    with local_runner(find_driver("torch"), [asked], device="cpu", store=tmp_path / "real") as runner:
        real = runner.trace("torch", asked, SHORT).run().end
    ending = simulated(tmp_path / "simulated", "torch", asked).run().end
    assert real is not None
    assert ending is not None
    # The first to raise is another rank each time.
    assert ending.message.partition(" raised ")[2] == real.message.partition(" raised ")[2]
    assert ending.action == real.action


def test_a_process_that_cannot_start_is_a_failed_launch(tmp_path: Path) -> None:
    ending = SimulatingLauncher().run(Request("", {"driver": "torch"}, 4, str(tmp_path)))
    assert ending.failed
    assert "the simulation ended with code 1 before any rank" in ending.headline()
