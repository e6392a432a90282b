"""Which runs of the store belong to which cell, and what a cell's training showed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.launchers import WithoutProcesses

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.events import SnapshotTaken
from pytest_distcompat.evidence.cells import add_training
from pytest_distcompat.evidence.store import add_evidence, read_store
from pytest_distcompat.launch.forensics.ending import Ending, RankEnd
from pytest_distcompat.launch.request import Request
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.result import Row
from pytest_distcompat.runner import Runner
from pytest_distcompat.scenario import STEPS
from pytest_distcompat.trace import (
    CollectiveInfo,
    FileInfo,
    Layout,
    MeshDim,
    ModelInfo,
    OptimizerInfo,
    ParameterInfo,
    RunTrace,
    Snapshot,
    StateInfo,
    StepInfo,
    UnwrappedInfo,
)

CELLS = (
    "ddp-fp32-w2",
    "fsdp2-fp32-w2",
    "fsdp2-fp32-w4",
    "fsdp1-bf16_upcast-w2",
    "fsdp2-fp32-w2-param_groups",
    "fsdp2-fp32-w2-cpu_offload",
    # Runs of one on a mesh that the other's ranks have no room for.
    "fsdp2-fp32-w2-tp_2",
    "fsdp2-fp32-w2-cp_2",
)


class Noted(WithoutProcesses):
    """A launcher whose ranks save and export at once."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def run(self, request: Request) -> Ending:
        request.write()
        self.ran.append(Path(request.directory).name)
        actions = request.payload["run"]["actions"]
        ends = []
        events: dict[int, list[SnapshotTaken]] = {}
        for rank in range(request.world_size):
            ends.append(RankEnd(rank, "done"))
            events[rank] = []
            for index, action in enumerate(actions):
                data = {"rank": rank, "run": "", "action": action, "index": index}
                events[rank].append(SnapshotTaken(action, index, data))
        return Ending(tuple(ends), events, seconds=1.0)


class Reading(Runner):
    """Notes which runs each call reads."""

    read: set[str]

    def _directory(self, *args: object) -> Path:
        directory = super()._directory(*args)  # type: ignore[arg-type]
        self.read.add(directory.name)
        return directory


def test_a_cell_has_the_runs_that_its_checks_read_and_no_other(tmp_path: Path) -> None:
    driver = find_driver("torch")
    wanted: dict[str, set[str]] = {}
    made: Any = Noted()
    runner = Reading(tmp_path, made, device="cpu", timeout=3)
    for cell in map(Cell.parse, CELLS):
        runner.read = set()
        for check in CHECKS.by_name.values():
            # One with a limit compares with another cell's training, which is that cell's.
            if not check.limit and not check.not_applicable(cell, driver):
                runner.trace("torch", cell, check.runs(cell, driver))
        wanted[cell.id] = runner.read
    rows_of_torch = [Row("S", "torch", cell) for cell in CELLS]
    row_of_accelerate = Row("S", "accelerate", CELLS[0])
    report = Report(rows=[*rows_of_torch, row_of_accelerate])
    add_evidence(report, read_store(tmp_path))
    *rows, other = report.rows
    for row in rows:
        assert set(row.runs) ^ wanted[row.cell] == set()
    assert other.runs == []
    assert {run["id"] for run in report.runs} == set.union(*wanted.values())
    shared = set.intersection(wanted["ddp-fp32-w2"], wanted["fsdp2-fp32-w2"])
    assert shared, "the reference is shared by the strategies, and that was to be tested"


def test_a_store_that_is_written_to_at_this_moment_is_read(tmp_path: Path) -> None:
    requests = {"half": '{"payload": ', "other": "{}"}
    for name, request in requests.items():
        directory = tmp_path / name
        directory.mkdir()
        (directory / "request.json").write_text(request, encoding="utf-8")
    assert read_store(tmp_path) == []
    assert read_store(tmp_path / "nothing") == []


WHOLE = ParameterInfo("a.weight", (4, 2), "bfloat16")
BIAS = ParameterInfo("a.bias", (4,), "bfloat16")
SHARD = dataclasses.replace(
    WHOLE,
    name="_orig_mod.a.weight",
    dtype="float32",
    kind="DTensor",
    layout=Layout((MeshDim("dp_shard", 2, 0, "Shard(0)"),), (0, 1)),
    local_numel=4,
    held=1,
)
STRAY = ParameterInfo("b.weight", (1,), "float32", local_numel=1)


def snapshot(rank: int, action: str, index: int, **infos: object) -> Snapshot:
    return Snapshot(rank, "train", action, index, **infos)  # type: ignore[arg-type]


def run() -> RunTrace:
    model = ModelInfo("M", {"FSDP2": 1}, (SHARD, STRAY))
    unwrapped = UnwrappedInfo((WHOLE, BIAS), state_dict=("a.weight", "a.bias"))
    snapshots = [snapshot(0, "build_model", 0, unwrapped=unwrapped)]
    for rank in range(2):
        snapshots.append(snapshot(rank, "build", 1, model=model, memory=10 + rank))
        for step in range(3):
            steps: tuple[StepInfo, ...] = ()
            if rank:
                steps = (StepInfo("AdamW", ("float32",), ("bfloat16",), ("float32",)),)
            norm = float("nan") if step else 1.5
            infos = {
                "loss": 4.0 - step + rank,
                "grad_norm": norm,
                "seconds": 0.1 * (rank + 1),
                "memory": 20 * (rank + 1) - step,
                "model": model,
                "compute": ("bfloat16",),
                "steps": steps,
                "collectives": (
                    CollectiveInfo("reduce_scatter_base", "bfloat16", 3, 900),
                    CollectiveInfo("allreduce", "float32", 1, 1),
                    CollectiveInfo("allgather_base", "float16", 1, 9000),
                ),
            }
            snapshots.append(snapshot(rank, "step", 2 + step, **infos))
    model_keys = ("a.weight", "_orig_mod.a.bias")
    model_file = FileInfo("model.safetensors", "safetensors", "model", model_keys)
    optimizer_file = FileInfo("o", "pickle", "optimizer", ("x",))
    snapshots.append(snapshot(0, "files", 5, files=(model_file, optimizer_file)))
    return RunTrace("train", 2, tuple(snapshots))


CELL = Cell.of("fsdp2", "bf16_upcast", compile=True)


def training(cell: Cell, *runs: RunTrace) -> Row:
    row = Row("TestX", "torch", cell.id)
    add_training(row, *runs)
    return row


def test_the_table_of_names() -> None:
    names = {}
    for row in training(CELL, run()).names:
        name = row.get("key") or row["unwrapped"] or row["live"]
        names[name] = row
    assert names["a.weight"] == {
        "unwrapped": "a.weight",
        "shape": [4, 2],
        "loaded": "bfloat16",
        "live": "_orig_mod.a.weight",
        "dtype": "float32",
        "kind": "DTensor",
        "placement": "dp_shard=Shard(0)",
        "local": 4,
        "held": 1,
        "files": ["model.safetensors"],
    }
    bias = names["a.bias"]
    assert bias["live"] == ""
    assert bias["files"] == []
    stray = names["b.weight"]
    assert stray["unwrapped"] == ""
    assert stray["live"] == "b.weight"
    saved_otherwise = names["_orig_mod.a.bias"]
    assert saved_otherwise["unwrapped"] == ""
    assert saved_otherwise["files"] == ["model.safetensors"]


def mesh_of(cell: str, *layouts_by_rank: dict[str, Layout], shape: tuple[int, ...] = (8, 4)) -> Any:
    """Return the mesh of a training in which each rank has built these parameters."""
    # Each name once, in order.
    unwrapped_by_name: dict[str, ParameterInfo] = {}
    for layouts in layouts_by_rank:
        for name in layouts:
            unwrapped_by_name[name] = ParameterInfo(name, shape, "float32")
    unwrapped = UnwrappedInfo(tuple(unwrapped_by_name.values()))
    built = [snapshot(0, "build_model", 0, unwrapped=unwrapped)]
    for rank, layouts in enumerate(layouts_by_rank):
        infos = []
        for name, layout in layouts.items():
            infos.append(ParameterInfo(name, shape, "float32", layout=layout))
        model = ModelInfo("M", {}, tuple(infos))
        built.append(snapshot(rank, "build", 1, model=model))
    trace = RunTrace("train", len(layouts_by_rank), tuple(built))
    return training(Cell.parse(cell), trace).mesh


def on_mesh(rank: int, shard: str, tp: str) -> Layout:
    """Return a layout on the mesh of two shards by two parts."""
    shards = MeshDim("dp_shard", 2, rank // 2, shard)
    parts = MeshDim("tp", 2, rank % 2, tp)
    return Layout((shards, parts))


def test_the_mesh_has_each_distinct_layout_once() -> None:
    layouts_by_rank: list[dict[str, Layout]] = [
        {
            "layers.0.up.weight": on_mesh(rank, "StridedShard(0, 2)", "Shard(0)"),
            "layers.1.up.weight": on_mesh(rank, "StridedShard(0, 2)", "Shard(0)"),
            "layers.0.down.weight": on_mesh(rank, "Shard(0)", "Shard(1)"),
            "norm.weight": Layout((MeshDim("dp_shard", 2, rank // 2, "Shard(0)"),)),
        }
        for rank in range(4)
    ]
    assert mesh_of("fsdp2-fp32-w4-tp_2", *layouts_by_rank) == {
        "dims": [{"name": "dp_shard", "size": 2}, {"name": "tp", "size": 2}],
        "ranks": [{"rank": rank, "at": [rank // 2, rank % 2]} for rank in range(4)],
        "layouts": [
            {
                "names": ["layers.*.up.weight"],
                "shape": [8, 4],
                "placement": "dp_shard=StridedShard(0, 2), tp=Shard(0)",
                # Layers are cut for tp first: the peers of tp hold neither the same nor neighbouring rows.
                "parts": ["0:2, :", "4:6, :", "2:4, :", "6:8, :"],
            },
            {
                "names": ["layers.0.down.weight"],
                "shape": [8, 4],
                "placement": "dp_shard=Shard(0), tp=Shard(1)",
                "parts": ["0:4, 0:2", "0:4, 2:4", "4:8, 0:2", "4:8, 2:4"],
            },
            {
                "names": ["norm.weight"],
                "shape": [8, 4],
                "placement": "dp_shard=Shard(0)",
                "parts": ["0:4, :", "0:4, :", "4:8, :", "4:8, :"],
            },
        ],
    }


def test_parts_that_are_uneven_or_flat_or_empty() -> None:
    layouts_by_rank = []
    for rank in range(4):
        layouts = {}
        if rank < 2:
            layouts["0"] = on_mesh(rank, "StridedShard(0, 2)", "Replicate")
        layouts["1"] = on_mesh(rank, "Shard(0)", "Replicate")
        layouts["2"] = on_mesh(rank, "Flat", "Shard(1)")
        layouts_by_rank.append(layouts)
    mesh = mesh_of("fsdp2-fp32-w4-tp_2", *layouts_by_rank, shape=(3, 2))
    parts_by_name = {layout["names"][0]: layout["parts"] for layout in mesh["layouts"]}
    assert parts_by_name == {
        # Rank 2 and 3 do not have the first at all.
        "0": ["0:1 + 2:3, :"] * 2 + ["none"] * 2,
        "1": ["0:2, :"] * 2 + ["2:3, :"] * 2,
        "2": [
            ":, 0:1; flat piece 1 of 2",
            ":, 1:2; flat piece 1 of 2",
            ":, 0:1; flat piece 2 of 2",
            ":, 1:2; flat piece 2 of 2",
        ],
    }
    of_one_element = [{"a": on_mesh(rank, "Shard(0)", "Replicate")} for rank in range(4)]
    mesh = mesh_of("fsdp2-fp32-w4-tp_2", *of_one_element, shape=(1,))
    (layout,) = mesh["layouts"]
    assert layout["parts"] == ["all", "all", "none", "none"]


def test_ranks_that_the_parameters_do_not_tell_apart() -> None:
    """A plan that fitted nothing: each rank has everything, and that is to be seen."""
    assert mesh_of("fsdp2-fp32-w2-tp_2", {"a": Layout()}, {"a": Layout()}) == {
        "dims": [{"name": "rank", "size": 2}],
        "ranks": [{"rank": 0, "at": [0]}, {"rank": 1, "at": [1]}],
        "layouts": [{"names": ["a"], "shape": [8, 4], "placement": "", "parts": ["all", "all"]}],
    }
    assert mesh_of("fsdp2-fp32-w2-tp_2") is None


def test_the_mesh_has_the_stages_of_a_pipeline() -> None:
    """A tensor is on the ranks of its stage alone, and a tied one on those of two."""
    layouts_by_rank: list[dict[str, Layout]] = []
    for rank in range(4):
        stage = rank // 2
        stages = MeshDim("pp", 2, stage, "Stage")
        shards = MeshDim("dp_shard", 2, rank % 2, "Shard(0)")
        layout = Layout((stages, shards))
        layouts_by_rank.append({"tied": layout, f"layers.{stage}.up": layout})
    both = ["0:4, :", "4:8, :"] * 2
    first = ["0:4, :", "4:8, :", "none", "none"]
    last = ["none", "none", "0:4, :", "4:8, :"]
    expected = [(["tied"], both), (["layers.1.up"], last), (["layers.0.up"], first)]
    mesh = mesh_of("fsdp2-fp32-w4-pp_2", *layouts_by_rank)
    assert mesh["dims"] == [{"name": "pp", "size": 2}, {"name": "dp_shard", "size": 2}]
    assert mesh["ranks"] == [
        {"rank": 0, "at": [0, 0]},
        {"rank": 1, "at": [0, 1]},
        {"rank": 2, "at": [1, 0]},
        {"rank": 3, "at": [1, 1]},
    ]
    assert [(layout["names"], layout["parts"]) for layout in mesh["layouts"]] == expected
    assert {layout["placement"] for layout in mesh["layouts"]} == {"pp=Stage, dp_shard=Shard(0)"}


def test_a_mesh_of_one_dimension_is_not_drawn() -> None:
    layouts_by_rank = []
    for rank in range(2):
        shards = MeshDim("dp_shard", 2, rank, "Shard(0)")
        tp = MeshDim("tp", 1, 0, "Shard(0)")
        layouts_by_rank.append({"a": Layout((shards, tp))})
    assert mesh_of("fsdp2-fp32-w2", *layouts_by_rank) is None


def test_the_table_of_dtypes() -> None:
    dtypes = training(CELL, run()).dtypes
    expected = {row["kind"]: row["expected"] for row in dtypes}
    seen = {row["kind"]: row["seen"] for row in dtypes}
    assert expected["storage"] == "float32"
    assert seen["storage"] == ["float32"]
    assert expected["compute"] == "bfloat16"
    assert seen["compute"] == ["bfloat16"]
    # Neither the norm's all-reduce nor the gather of parameters.
    assert seen["reduce"] == ["bfloat16"]
    assert seen["gradient"] == ["bfloat16"]
    assert seen["master"] == ["float32"]
    assert seen["state"] == ["float32"]


def test_curves_and_memory() -> None:
    reference_step = snapshot(0, "reference", 1, loss=4.25, grad_norm=1.25)
    reference = RunTrace("reference", 1, (reference_step,))
    resumed_step = snapshot(0, "step", 3, loss=0.5, grad_norm=2.0, seconds=0.5)
    resumed = RunTrace("resume", 2, (resumed_step,))
    shown = training(CELL, run(), reference, resumed)
    loss_tolerances = shown.steps.pop("loss_tolerance")
    norm_tolerances = shown.steps.pop("grad_norm_tolerance")
    precision = PRECISIONS.get("bf16_upcast")
    assert min(tolerance or 0 for tolerance in loss_tolerances) >= precision.loss_tolerance > 0
    assert norm_tolerances == [precision.norm_tolerance] * STEPS
    assert shown.steps == {
        "loss": [4.5, 3.5, 2.5],
        "grad_norm": [1.5, None, None],
        "seconds": [0.2, 0.2, 0.2],
        "reference_loss": [4.25],
        "reference_grad_norm": [1.25],
        "resumed_loss": [None, None, None, 0.5],
        "resumed_grad_norm": [None, None, None, 2.0],
    }
    assert shown.memory == [20, 40]
    json.dumps(dataclasses.asdict(shown), allow_nan=False)


def test_the_bytes_that_each_rank_holds() -> None:
    # 4 elements are sharded to each rank, 1 is stray; the gradients of the rank with a step are in bfloat16.
    assert training(CELL, run()).tensor_bytes == {
        "parameters": [20, 20],
        "gradients": [0, 8],
        "optimizer": [0, 0],
    }
    moments = (
        StateInfo("a.weight", "exp_avg", "float32", 4, ""),
        StateInfo("a.weight", "step", "float32", 1, ""),
    )
    masters = (*moments, StateInfo("flat 0", "master", "float32", 3, ""))
    for states, without, expected in (
        (moments, (), {"parameters": 20, "gradients": 8, "optimizer": 16}),
        (moments, (SHARD.name,), {"parameters": 20, "gradients": 0, "optimizer": 16}),
        # Flat masters beside the parameters are the optimizer's.
        (masters, (), {"parameters": 20, "gradients": 6, "optimizer": 28}),
    ):
        optimizer = OptimizerInfo(("AdamW",), 1, states=states, without_gradient=without)
        steps = []
        for snapshot in run().snapshots:
            if snapshot.rank == 1:
                steps.append(dataclasses.replace(snapshot, optimizer=optimizer))
        shown = training(CELL, RunTrace("train", 2, tuple(steps)))
        assert shown.tensor_bytes == {name: [size] for name, size in expected.items()}


@pytest.mark.parametrize("actions", [(), ("build_model",), ("build_model", "build"), ("build_model", "build", "step")])
def test_a_training_that_broke_off_shows_what_there_is(actions: tuple[str, ...]) -> None:
    snapshots = []
    for snapshot in run().snapshots:
        if snapshot.action in actions and snapshot.index < 3:
            snapshots.append(snapshot)
    shown = training(CELL, RunTrace("train", 2, tuple(snapshots)))
    assert bool(shown.names) == ("build_model" in actions)
    assert shown.dtypes == []
    assert len(shown.steps.get("loss", ())) == ("step" in actions)
