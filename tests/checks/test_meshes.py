"""Checks on meshes with tensor parallelism, on hand-made traces: what they say of a dimension that is not data parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.checks.test_gradients import scaled

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.trace import CollectiveInfo, Layout

if TYPE_CHECKING:
    from tests.checks.test_reshard import RunsOf
    from tests.checks.traces import Sound

ALONE = "fsdp2-fp32-w2-tp_2"
WITH_SHARDS = "fsdp2-fp32-w4-tp_2"
WITH_REPLICAS = "fsdp2-fp32-w8-dp_replicate_2-tp_2"
MESHES = (ALONE, WITH_SHARDS, WITH_REPLICAS)


def test_peers_are_fed_the_same_rows_and_others_different_ones(sound: Sound) -> None:
    assert sound(WITH_SHARDS).findings("data") == []
    other = {"inputs": ("batch 1.0 of rank 7",)}
    expected = "expected the same, as they hold parts of the same layers (tp 2)"
    changed = sound(WITH_SHARDS).snapshot("step", other, nth=0, rank=3)
    assert changed.findings("data") == [f"ranks 2 and 3 are fed different batches in step 1; {expected}"]
    story = sound(WITH_SHARDS)
    for rank in (2, 3):
        story = story.snapshot("step", {"inputs": ("batch 1.0 of rank 0",)}, nth=0, rank=rank)
    assert story.findings("data") == [f"ranks 0 and {rank} are fed the same batch in step 1" for rank in (2, 3)]


@pytest.mark.parametrize("cell", MESHES)
def test_norms_count_once_what_several_ranks_hold(sound: Sound, cell: str) -> None:
    assert sound(cell).findings("clipping") == sound(cell).findings("gradients") == []
    story = sound(cell)
    copies = 2 if cell == WITH_REPLICAS else 1
    changed = story.stepped({"square": 4.0 / (story.cell.world_size / copies)}, action="step")
    twice = changed.findings("clipping")
    assert len(twice) == copies
    for finding in twice:
        assert "together: the gradients that the optimizer gets have norm 2; 1 in the reference" in finding


def test_a_gradient_that_is_off_by_the_size_of_tp(sound: Sound) -> None:
    story = scaled(sound("fsdp2-fp32-w8-tp_2"), {"outlet.weight": 2.0})
    [finding] = story.findings("gradients")
    assert finding.startswith(
        "step 1: all ranks: the gradient of outlet.weight is 2 times the reference's (= the size of tp)"
    )
    story = scaled(sound("fsdp2-fp32-w8-tp_2"), {"outlet.weight": 4.0})
    assert "4 times the reference's (= the number of data-parallel ranks)" in story.findings("gradients")[0]


@pytest.mark.parametrize("cell", MESHES)
def test_memory_per_axis(sound: Sound, cell: str) -> None:
    assert sound(cell).findings("memory") == []
    story = sound(cell)
    copies = 2 if cell == WITH_REPLICAS else 1
    context = "16 elements are trained, in 2 copies" if copies == 2 else "16 elements are trained"
    fewer = story.state("exp_avg", {"numel": 1}, only="outlet.weight", action="step", nth=2)
    kept = 8 * copies + story.cell.world_size
    assert fewer.findings("memory") == [
        f"all ranks together keep {kept} elements of 'exp_avg'; {context}, expected {16 * copies}"
    ]
    # Had tensor parallelism left it whole, there would be state for it on each of its ranks.
    changed = story.parameters({"layout": Layout()}, only="outlet.weight", action="build")
    findings = changed.findings("memory")
    assert findings[0].startswith(
        f"all ranks together keep {16 * copies} elements of 'exp_avg'; 24 elements are trained"
    )


@pytest.mark.parametrize("cell", [WITH_SHARDS, WITH_REPLICAS])
@pytest.mark.parametrize("check", ["reshard", "portable", "export", "resume"])
def test_checkpoints_move_between_meshes(runs_of: RunsOf, cell: str, check: str) -> None:
    story = runs_of(cell, check)
    assert story.findings(check) == []
    if check == "reshard":
        meshes = {name: run.cell for name, run in story.trace.runs.items()}
        plain = cell.replace("-dp_replicate_2", "").removesuffix("-tp_2")
        assert meshes == {"train": cell, "up": plain, "back": cell, "one": "fsdp2-fp32-w1"}
        where = {"run": "back", "action": "load"}
        changed = story.parameters({"digest": "3:1"}, only="inlet.weight", rank=1, **where)
        other = changed.findings("reshard")
        assert other[0].startswith("parameter 'inlet.weight': ")
        assert other[0].endswith(f" after the load at {story.cell.world_size} ranks with tp 2")


@pytest.mark.parametrize(
    ("cell", "back"),
    [
        ("fsdp2-fp32-w4-model_mlp-tp_2", "fsdp2-fp32-w4-model_mlp-tp_4"),
        ("fsdp2-fp32-w4-model_mlp-tp_4", "fsdp2-fp32-w4-model_mlp-tp_4"),
        ("fsdp2-fp32-w2-model_mlp-tp_2", "fsdp2-fp32-w2-model_mlp-tp_2"),
        # Four parts of eight ranks would leave its replicas one shard each.
        ("fsdp2-fp32-w8-model_mlp-dp_replicate_2-tp_2", "fsdp2-fp32-w8-model_mlp-dp_replicate_2-tp_2"),
        # Two heads of keys and values.
        ("fsdp2-fp32-w4-tp_2-sp", "fsdp2-fp32-w4-tp_2-sp"),
    ],
)
def test_a_checkpoint_is_loaded_in_the_most_parts(cell: str, back: str) -> None:
    runs = {run.name: run for run in CHECKS.get("reshard").runs(Cell.parse(cell), TorchDriver).runs}
    assert runs["back"].cell(Cell.parse(cell)).id == back


def test_losses_of_other_batches_are_not_compared(runs_of: RunsOf) -> None:
    story = runs_of(WITH_SHARDS, "portable").snapshot("step", {"loss": 7.0}, run="port", nth=1)
    assert story.findings("portable") == []
    infinite = story.snapshot("step", {"loss": float("inf")}, run="port", nth=1, rank=2)
    assert infinite.findings("portable") == [
        "rank 2: the loss of step 2 after the load under ddp is inf; expected a finite number"
    ]


def test_accumulation_beside_tensor_parallelism_counts_gradients_alone(sound: Sound) -> None:
    # Activations are reduced in each micro-batch.
    story = sound("fsdp2-fp32-w4-grad_accum_2-tp_2")
    assert story.findings("accumulation") == []
    gradients = CollectiveInfo("reduce_scatter_base", "float32", 2, 16, 32, (0, 2))
    more = (*story.trace.run().at("step", 1)[0].collectives, gradients)
    changed = story.snapshot("step", {"collectives": more}, nth=1, rank=0)
    assert "elements of gradients were reduced; expected 16 with one micro-batch" in " ".join(
        changed.findings("accumulation")
    )


SEQUENCES = ("fsdp2-fp32-w2-cp_2", "fsdp2-fp32-w4-cp_2", "fsdp2-fp32-w4-cp_4", "fsdp2-fp32-w8-tp_2-cp_2")


@pytest.mark.parametrize("cell", SEQUENCES)
@pytest.mark.parametrize("check", ["active", "data", "memory", "clipping", "gradients", "dtypes"])
def test_a_sound_mesh_of_context_parallelism(sound: Sound, cell: str, check: str) -> None:
    assert sound(cell).findings(check) == []


def test_ranks_of_a_sequence_are_fed_different_parts_of_it(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w4-cp_2")
    inputs = story.trace.run().at("step", 0)[2].inputs
    changed = story.snapshot("step", {"inputs": inputs}, nth=0, rank=3)
    assert changed.findings("data") == [
        "ranks 2 and 3 are fed the same batch in step 1; expected another part of the sequence on each (cp 2)"
    ]
    changed = story.snapshot("step", {"inputs": inputs}, nth=0, rank=0)
    assert changed.findings("data") == ["ranks 0 and 2 are fed the same batch in step 1"]


def test_ranks_of_a_sequence_exchange_keys_and_values(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w4-cp_2")
    gradients = CollectiveInfo("reduce_scatter_base", "float32", 1, 16, 16, (0, 1, 2, 3))
    changed = story.snapshot("step", {"collectives": (gradients,)}, nth=2, rank=3)
    assert changed.findings("active") == [
        (
            "rank 3: ranks 2, 3 exchanged nothing among themselves in a step; expected context parallelism (cp 2): attention to the "
            "keys and values of the other parts of the sequence"
        )
    ]
