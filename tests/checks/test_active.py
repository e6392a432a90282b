"""Check ``active`` on hand-made traces: something else runs than the cell says."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.checks import CHECKS
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import CollectiveInfo, Layout, MeshDim, ParameterInfo, Snapshot, UnwrappedInfo

if TYPE_CHECKING:
    from tests.checks.traces import Sound

CELLS = list(map("-".join, itertools.product(STRATEGIES.names(), PRECISIONS.names(), ["w2"])))
OTHERS = [
    "ddp-fp32-w1",
    "ddp-fp32-w4",
    "ddp-fp32-w2-compile",
    "ddp-fp32-w2-compile_regional",
    "ddp-fp32-w2-activation_checkpointing",
    "ddp-fp32-w2-grad_accum_4",
    "fsdp1-fp32-w1",
    "fsdp1-fp32-w4",
    "fsdp1-fp32-w2-compile_aot_eager",
    "fsdp1-fp32-w2-activation_checkpointing",
    "fsdp1-fp32-w2-ignored_modules",
    "fsdp1-fp32-w2-grad_accum_2",
    "fsdp2-fp32-w1",
    "fsdp2-fp32-w4",
    "fsdp2-fp32-w2-compile",
    "fsdp2-fp32-w2-compile_partial",
    "fsdp2-fp32-w2-activation_checkpointing",
    "fsdp2-fp32-w2-ignored_modules",
    "fsdp2-fp32-w2-grad_accum_2",
    "zero1-fp32-w1",
    "zero1-fp32-w4",
    "zero1-fp32-w2-grad_accum_2",
    "zero3-fp32-w1",
    "zero3-fp32-w4",
    "zero3-fp32-w2-compile",
    "zero3-fp32-w2-grad_accum_2",
]
OTHERS_BY_NIGHT = [pytest.param(cell, marks=pytest.mark.nightly) for cell in OTHERS]
#: Hybrid shards: ranks 0 and 1 hold a copy, and 2 and 3.
HYBRID = ["fsdp1-fp32-w4-dp_replicate_2", "fsdp2-bf16_upcast-w4-dp_replicate_2", "fsdp2-fp32-w8-dp_replicate_2"]
#: Tensor parallelism: alone, with shards, and with replicas of these.
TENSOR = ["fsdp2-fp32-w2-tp_2", "fsdp2-fp32-w4-tp_2", "fsdp2-fp32-w8-dp_replicate_2-tp_2"]


@pytest.mark.parametrize("check", CHECKS.names())
@pytest.mark.parametrize("cell", [*CELLS, *OTHERS_BY_NIGHT, *HYBRID, *TENSOR])
def test_a_sound_trace_has_no_findings(sound: Sound, cell: str, check: str) -> None:
    story = sound(cell)
    if story.judges(check):
        assert story.findings(check) == []


def test_every_check_of_these_runs_is_tested(sound: Sound) -> None:
    judged: set[str] = set()
    for cell in OTHERS:
        story = sound(cell)
        judged.update(filter(story.judges, CHECKS.names()))
    assert judged >= {
        "active",
        "names",
        "optimizer",
        "dtypes",
        "resume",
        "parity",
        "clipping",
        "units",
        "data",
        "accumulation",
    }


@pytest.mark.parametrize(
    ("cell", "wrappers", "finding"),
    [
        ("ddp-fp32-w2", {}, "rank 1: Toy runs as a bare model; expected DDP for ddp"),
        ("fsdp2-fp32-w2", {"DDP": 1}, "rank 1: Toy runs as DDP x 1; expected FSDP2 for fsdp2"),
        ("zero3-fp32-w2", {"DDP": 1}, "rank 1: Toy runs as DDP x 1; expected DeepSpeedEngine for zero3"),
        ("fsdp1-fp32-w2", {"FSDP2": 3}, "rank 1: Toy runs as FSDP2 x 3; expected FSDP1 for fsdp1"),
        ("fsdp2-fp32-w2", {"FSDP2": 3, "DDP": 1}, "rank 1: also wrapped by DDP; expected FSDP2 alone"),
    ],
)
def test_the_wrapper(sound: Sound, cell: str, wrappers: dict[str, int], finding: str) -> None:
    story = sound(cell).model({"wrappers": wrappers}, action="build", rank=1)
    assert story.findings("active") == [finding]


@pytest.mark.parametrize(
    ("cell", "changes", "finding"),
    [
        ("zero3-fp32-w2", {"zero_stage": 2}, "rank 0: ZeRO stage 2 is running; expected 3"),
        ("zero1-fp32-w2", {"zero_stage": 0}, "rank 0: ZeRO stage 0 is running; expected 1"),
        ("zero1-fp32-w2", {"zero_stage": None}, "rank 0: ZeRO stage None is running; expected 1"),
        ("ddp-fp32-w2", {"zero_stage": 1}, "rank 0: ZeRO stage 1 is running; expected None"),
        ("ddp-fp32-w2", {"world_size": 1}, "rank 0: the process group has 1 ranks; expected 2"),
        ("fsdp2-fp32-w2", {"trainer_world_size": 1}, "rank 0: the trainer believes in 1 ranks; expected 2"),
    ],
)
def test_stage_and_world(sound: Sound, cell: str, changes: dict[str, Any], finding: str) -> None:
    story = sound(cell).model(changes, action="build", rank=0)
    assert story.findings("active") == [finding]


def test_a_trainer_without_an_opinion_on_the_world_is_fine(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").model({"trainer_world_size": None}, action="build")
    assert story.findings("active") == []


@pytest.mark.parametrize(
    ("cell", "kind", "finding"),
    [
        ("fsdp2-fp32-w2", "Tensor", "rank 0: 1 of 3 parameters are not of kind DTensor, 'outlet.weight' is a Tensor"),
        (
            "zero3-fp32-w2",
            "Tensor",
            "rank 0: 1 of 3 parameters are not of kind ZeRO-3, 'module.outlet.weight' is a Tensor",
        ),
        (
            "zero1-fp32-w2",
            "ZeRO-3",
            "rank 0: 1 of 3 parameters are not of kind Tensor, 'module.outlet.weight' is a ZeRO-3",
        ),
    ],
)
def test_the_kind_of_a_parameter(sound: Sound, cell: str, kind: str, finding: str) -> None:
    story = sound(cell).parameters({"kind": kind}, only="outlet.weight", action="build", rank=0)
    assert story.findings("active") == [finding]


def test_fsdp1_may_keep_flat_parameters(sound: Sound) -> None:
    story = sound("fsdp1-fp32-w2").parameters({"kind": "FlatParameter"}, action="build")
    assert story.findings("active") == []


def test_no_live_parameter_at_all(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").model({"parameters": ()}, action="build")
    assert story.findings("active") == [
        "rank 0: 0 of 0 parameters are not of kind DTensor, there is none",
        "rank 1: 0 of 0 parameters are not of kind DTensor, there is none",
        "all ranks together store 0.00 copies of the parameters; expected 1, each rank its shard",
    ]


def test_no_model(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").snapshot("build", {"model": None}, rank=1)
    assert story.findings("active") == [
        "rank 1: no model after build; the driver must set self.model",
        "all ranks together store 1.00 copies of the parameters; expected 2, one a rank",
    ]


@pytest.mark.parametrize(
    ("cell", "numel", "finding"),
    [
        (
            "fsdp2-fp32-w2",
            16,
            "all ranks together store 1.50 copies of the parameters; expected 1, each rank its shard",
        ),
        ("zero3-fp32-w2", 0, "all ranks together store 0.50 copies of the parameters; expected 1, each rank its shard"),
        ("zero1-fp32-w2", 8, "all ranks together store 1.50 copies of the parameters; expected 2, one a rank"),
        ("ddp-fp32-w2", 0, "all ranks together store 1.00 copies of the parameters; expected 2, one a rank"),
    ],
)
def test_shards_are_shards_and_replicas_replicas(sound: Sound, cell: str, numel: int, finding: str) -> None:
    # The frozen parameter is half of the model.
    story = sound(cell).parameters({"local_numel": numel}, only="frozen.weight", action="build")
    assert story.findings("active") == [finding]


@pytest.mark.parametrize("cell", ["fsdp1-fp32-w2", "fsdp2-fp32-w2", "zero3-fp32-w2"])
@pytest.mark.parametrize(("outlet", "frozen", "stored"), [(8, 8, 16), (3, 9, 6)])
def test_each_parameter_is_sharded(sound: Sound, cell: str, outlet: int, frozen: int, stored: int) -> None:
    # In the sum over all parameters it does not show.
    story = sound(cell).parameters({"local_numel": outlet}, only="outlet.weight", action="build")
    story = story.parameters({"local_numel": frozen}, only="frozen.weight", action="build")
    outlet_finding = (
        f"all ranks together store {stored} elements of 'outlet.weight', which has 8; expected each one once"
    )
    frozen_finding = "all ranks together store 18 elements of 'frozen.weight', which has 16; expected each one once"
    # What is cut flat may be padded.
    if cell == "fsdp2-fp32-w2" and frozen == 9:
        assert story.findings("active") == [frozen_finding, outlet_finding]
    else:
        assert story.findings("active") == [outlet_finding]


def test_zero3_may_pad_its_shards(sound: Sound) -> None:
    story = sound("zero3-fp32-w2").parameters({"local_numel": 6}, only="outlet.weight", action="build")
    assert story.findings("active") == []


@pytest.mark.parametrize("unwrapped", [None, UnwrappedInfo(())])
def test_no_unwrapped_model_to_compare_with(sound: Sound, unwrapped: UnwrappedInfo | None) -> None:
    story = sound("ddp-fp32-w2").snapshot("build_model", {"unwrapped": unwrapped})
    assert story.findings("active") == ["the unwrapped model has no parameters, or was not recorded"]


@pytest.mark.parametrize(
    ("cell", "collectives", "seen"),
    [
        ("ddp-fp32-w2", (), "none"),
        # A sum of one element is a norm or a count.
        ("ddp-fp32-w2", (CollectiveInfo("allreduce", "float32", 3, 1),), "allreduce"),
        ("fsdp2-fp32-w2", (CollectiveInfo("allgather_base", "float32", 3, 16),), "allgather_base"),
        ("zero3-fp32-w2", (CollectiveInfo("allgather_base", "float32", 3, 16),), "allgather_base"),
    ],
)
def test_gradients_must_be_reduced(sound: Sound, cell: str, collectives: tuple[CollectiveInfo, ...], seen: str) -> None:
    story = sound(cell).snapshot("step", {"collectives": collectives}, nth=2, rank=1)
    assert story.findings("active") == [
        f"rank 1: no gradient was reduced in a step (collectives: {seen}); ranks train on their own"
    ]


def test_what_is_reduced_must_be_about_as_large_as_the_model(sound: Sound) -> None:
    flags = (CollectiveInfo("allreduce", "int64", 9, 16), CollectiveInfo("allreduce", "float32", 9, 1))
    story = sound("zero1-fp32-w2").snapshot("step", {"collectives": flags}, nth=2, rank=0)
    assert story.findings("active") == [
        "rank 0: no gradient was reduced in a step (collectives: allreduce); ranks train on their own"
    ]
    few = CollectiveInfo("allreduce", "float32", 1, 3)
    unwrapped = UnwrappedInfo((ParameterInfo("outlet.weight", (8, 4), "float32", local_numel=32),), obeyed=())
    story = sound("zero1-fp32-w2").snapshot("build_model", {"unwrapped": unwrapped})
    changed = story.snapshot("step", {"collectives": (*flags, few)}, nth=2, rank=0)
    assert (
        "rank 0: only 3 elements were reduced in a step, of 32 trainable ones; that is no gradient, ranks train on their own"
        in changed.findings("active")
    )


@pytest.mark.parametrize("cell", ["fsdp2-fp32-w4-tp_2", "fsdp2-fp32-w4-tp_2-sp"])
def test_activations_of_tensor_parallelism_are_no_gradients(sound: Sound, cell: str) -> None:
    activations = CollectiveInfo("reduce_scatter_tensor", "float32", 9, 16, 144, (2, 3))
    story = sound(cell).snapshot("step", {"collectives": (activations,)}, nth=2, rank=3)
    assert story.findings("active") == [
        "rank 3: no gradient was reduced in a step (collectives: reduce_scatter_tensor); ranks train on their own"
    ]


def test_sequence_parallelism_scatters_sums(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w4-tp_2-sp")
    assert story.findings("active") == []
    uncut = replace(sound("fsdp2-fp32-w4-tp_2"), cell=story.cell)
    # Gathered logits, and gradients that are scattered between other ranks, are no proof.
    logits = CollectiveInfo("all_gather_into_tensor", "float32", 1, 16, 16, (0, 1))
    step_of_rank_0 = uncut.trace.run().at("step", 2)[0]
    sent = (*step_of_rank_0.collectives, logits)
    uncut = uncut.snapshot("step", {"collectives": sent}, nth=2, rank=0)
    expected = "expected sequence parallelism to cut what lies between layers along the sequence"
    of_rank_0 = "all_gather_into_tensor, all_reduce"
    assert uncut.findings("active") == [
        f"rank 0: no sum of ranks 0, 1 was scattered in a step (collectives of activations: {of_rank_0}); {expected}",
        f"rank 1: no sum of ranks 0, 1 was scattered in a step (collectives of activations: all_reduce); {expected}",
        f"rank 2: no sum of ranks 2, 3 was scattered in a step (collectives of activations: all_reduce); {expected}",
        f"rank 3: no sum of ranks 2, 3 was scattered in a step (collectives of activations: all_reduce); {expected}",
    ]


def test_one_rank_alone_reduces_nothing(sound: Sound) -> None:
    story = sound("ddp-fp32-w1").snapshot("step", {"collectives": ()})
    assert story.findings("active") == []


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "zero1-fp32-w2"])
@pytest.mark.parametrize(("nth", "when"), [(2, "three steps"), (19, "20 steps")])
def test_replicas_stay_equal(sound: Sound, cell: str, nth: int, when: str) -> None:
    story = sound(cell).parameters({"digest": "other"}, only="outlet.weight", action="step", nth=nth, rank=1)
    assert story.findings("active") == [
        f"rank 1: 1 parameters differ from rank 0's after {when}, first 'module.outlet.weight'; replicas must stay equal"
    ]


def test_replicas_that_differ_early_are_one_finding(sound: Sound) -> None:
    story = sound("ddp-fp32-w2")
    for nth in (2, 19):
        story = story.parameters({"digest": "other"}, only="outlet.weight", action="step", nth=nth, rank=1)
    assert len(story.findings("active")) == 1


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp2-fp32-w4-dp_replicate_2"])
def test_optimizer_state_and_gradients_of_replicas_stay_equal(sound: Sound, cell: str) -> None:
    story = sound(cell)
    last = story.cell.world_size - 1
    # The first rank that holds the same part.
    peer = last // 2
    name = story.live("outlet.weight")
    where = {"action": "step", "nth": 2, "rank": last}
    moments = story.state("exp_avg", {"digest": "other"}, only="outlet.weight", **where)
    differs = f"differ from rank {peer}'s after three steps, first 'exp_avg of {name}'; replicas must stay equal"
    assert moments.findings("active") == [f"rank {last}: 1 tensors of the optimizer's state {differs}"]
    # LBFGS keeps the last loss, which is the rank's own, as a plain number.
    loss = {"digest": "other", "dtype": "float"}
    changed = story.state("exp_avg", loss, only="outlet.weight", **where)
    assert changed.findings("active") == []
    (step,) = story.trace.run().at("step", 2)[last].steps
    gradients = []
    for info in step.gradients:
        if info.name == name:
            gradients.append(replace(info, square=4 * info.square))
        else:
            gradients.append(info)
    changed = story.stepped({"gradients": tuple(gradients)}, **where)
    assert changed.findings("active") == [
        f"rank {last}: 1 gradients differ from rank {peer}'s after three steps, first {name!r}; replicas must stay equal"
    ]


@pytest.mark.parametrize("cell", HYBRID)
def test_copies_of_shards_stay_equal(sound: Sound, cell: str) -> None:
    story = sound(cell)
    shards = story.cell.world_size // 2
    for rank in range(story.cell.world_size):
        changed = story.parameters({"digest": "other"}, only="outlet.weight", action="step", nth=2, rank=rank)
        # Told of the second copy: of two nobody knows which is right.
        of = shards + rank % shards
        peer = rank % shards
        name = story.live("outlet.weight")
        assert changed.findings("active") == [
            f"rank {of}: 1 parameters differ from rank {peer}'s after three steps, first {name!r}; replicas must stay equal"
        ]


@pytest.mark.parametrize("cell", TENSOR)
def test_layers_are_cut_along_tp(sound: Sound, cell: str) -> None:
    story = sound(cell)
    plain = sound(cell.removesuffix("-tp_2"))
    uncut = replace(plain, cell=story.cell)
    assert (
        "rank 0: layers are whole on each rank; expected 2 parts of tensor parallelism, along a mesh dimension named 'tp'"
        in uncut.findings("active")
    )
    changed = replace(story, cell=plain.cell)
    assert (
        "rank 0: layers are in 2 parts; expected 1 parts of tensor parallelism, along a mesh dimension named 'tp'"
        in changed.findings("active")
    )


@pytest.mark.parametrize("cell", TENSOR)
@pytest.mark.parametrize("name", ["inlet.weight", "frozen.weight"])
def test_what_tensor_parallelism_replicates_stays_equal(sound: Sound, cell: str, name: str) -> None:
    # A part of a layer has one holder on its mesh but for the copies; what is whole has one on each rank of tp.
    story = sound(cell).parameters({"digest": "other"}, only=name, action="step", nth=2, rank=1)
    whole = f"rank 1: 1 parameters differ from rank 0's after three steps, first '{name}'; replicas must stay equal"
    of_copies = f"rank 5: 1 parameters differ from rank 1's after three steps, first '{name}'; replicas must stay equal"
    if name == "frozen.weight":
        assert story.findings("active") == [whole]
    elif "dp_replicate" in cell:
        assert story.findings("active") == [of_copies]
    else:
        assert story.findings("active") == []


def test_a_part_of_tensor_parallelism_that_is_missing(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w4-tp_2").parameters({"local_numel": 4}, only="outlet.weight", action="build", rank=3)
    assert story.findings("active") == [
        "all ranks together store 10 elements of 'outlet.weight', which has 8; expected each one once"
    ]


def test_the_number_of_replicas_is_the_requested_one(sound: Sound) -> None:
    in_two_copies = sound("fsdp2-fp32-w4-dp_replicate_2")
    in_one_copy = sound("fsdp2-fp32-w4")
    too_few = replace(in_two_copies, trace=in_one_copy.trace)
    assert too_few.findings("active") == ["shards are in 1 copies (all ranks); expected 2"]
    too_many = replace(in_one_copy, trace=in_two_copies.trace)
    assert too_many.findings("active") == ["shards are in 2 copies (ranks 0, 1; ranks 2, 3); expected 1"]
    # Whose driver does not speak of it may have copies.
    quiet = too_many.unwrapped({"obeyed": ()})
    assert quiet.findings("active") == []
    alone = sound("fsdp2-fp32-w2").unwrapped({"obeyed": ()}).parameters({"layout": Layout()})
    assert alone.findings("active")[0] == "shards are in 2 copies (rank 0; rank 1); expected 1, of several ranks"


def test_a_rank_with_a_whole_model_holds_no_shard_of_replicas(sound: Sound) -> None:
    layout = Layout((MeshDim("dp_shard", 2, 0, "Shard(0)"),), (0, 1))
    story = sound("fsdp2-fp32-w4").parameters({"layout": Layout()})
    story = story.parameters({"layout": layout}, rank=0).parameters({"layout": layout}, rank=1)
    assert story.findings("active")[0] == "shards are in 3 copies (ranks 0, 1; rank 2; rank 3); expected 1"


def test_each_copy_is_one(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w4-dp_replicate_2").parameters({"local_numel": 0}, action="build", rank=3)
    assert story.findings("active") == [
        "ranks 2, 3 together store 0.50 copies of the parameters; expected 1, each rank its shard"
    ]
    story = sound("fsdp2-fp32-w4-dp_replicate_2").parameters(
        {"local_numel": 16}, only="outlet.weight", action="build", rank=2
    )
    assert story.findings("active") == [
        "ranks 2, 3 together store 20 elements of 'outlet.weight', which has 8; expected each one once"
    ]


@pytest.mark.parametrize(
    ("action", "nth", "finding"),
    [("build", 0, "rank 1: no report after build"), ("step", 2, "rank 1: no report after three steps")],
)
def test_silence_is_no_proof(sound: Sound, action: str, nth: int, finding: str) -> None:
    story = sound("fsdp2-fp32-w2").without(action, nth=nth, rank=1)
    assert finding in story.findings("active")


def test_all_ranks_silent(sound: Sound) -> None:
    def nothing(snapshot: Snapshot) -> Snapshot | None:
        return snapshot if snapshot.action == "build_model" else None

    story = sound("ddp-fp32-w2").alter(nothing)
    assert story.findings("active") == [
        "rank 0, 1: no report after build",
        "all ranks together store 0.00 copies of the parameters; expected 2, one a rank",
        "rank 0, 1: no report after three steps",
    ]


def test_findings_alike_are_one(sound: Sound) -> None:
    def double(snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, rank=0, model=snapshot.model and replace(snapshot.model, zero_stage=1))

    story = sound("ddp-fp32-w2").alter(double, action="build")
    findings = story.findings("active")
    assert findings == ["rank 1: no report after build", "rank 0: ZeRO stage 1 is running; expected None"]


def test_experts_are_cut_along_ep(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w4").with_option("ep", 2)
    expected = "expected 2 parts of expert parallelism, along a mesh dimension named 'ep'"
    assert story.findings("active") == on_ranks(4, f"experts are whole on each rank; {expected}")
    dims = (MeshDim("dp_shard", 2, 0, "Shard(0)"), MeshDim("ep", 2, 0, "Shard(0)"))
    part = Layout(dims, (0, 1, 2, 3))
    cut = story.parameters({"layout": part}, only="frozen.weight", action="build")
    assert cut.findings("active") == []


def on_ranks(size: int, finding: str) -> list[str]:
    """Return the same finding of each rank."""
    return [f"rank {rank}: {finding}" for rank in range(size)]


def test_a_secondary_partition(sound: Sound) -> None:
    setting = "ds_config.zero_optimization.zero_hpz_partition_size=2"
    story = sound("zero3-fp32-w4").with_option("set", setting)
    assert story.stepped({"secondary": 2}).findings("active") == []
    expected = "expected one among 2 (zero_hpz_partition_size), when the optimizer steps"
    for size, seen in ((0, "nowhere"), (4, "among 4 ranks")):
        changed = story.stepped({"secondary": size})
        finding = f"the secondary partition of weights is {seen}; {expected}"
        assert changed.findings("active") == on_ranks(4, finding)


def test_a_secondary_partition_has_all_ranks_where_there_are_fewer(sound: Sound) -> None:
    setting = "ds_config.zero_optimization.zero_hpz_partition_size=8"
    story = sound("zero3-fp32-w2").with_option("set", setting)
    assert story.stepped({"secondary": 2}).findings("active") == []
    expected = "expected one among 2 (zero_hpz_partition_size), when the optimizer steps"
    nowhere = story.stepped({"secondary": 0})
    assert nowhere.findings("active") == on_ranks(2, f"the secondary partition of weights is nowhere; {expected}")


ONE_RANK_FSDP1 = {"kind": "Tensor"}


def test_on_one_rank_fsdp1_does_not_shard(sound: Sound) -> None:
    story = sound("fsdp1-fp32-w1").parameters(ONE_RANK_FSDP1)
    assert story.findings("active") == []


def test_on_two_ranks_fsdp1_shards(sound: Sound) -> None:
    story = sound("fsdp1-fp32-w2").parameters(ONE_RANK_FSDP1, action="build", rank=1)
    (finding,) = story.findings("active")
    assert finding.startswith("rank 1: 3 of 3 parameters are not of kind FSDP1 shard")


@pytest.mark.parametrize(
    ("cell", "wrappers"),
    [("ddp-fp32-w1", {}), ("ddp-fp32-w1", {"DDP": 1}), ("ddp-fp32-w1-compile", {"OptimizedModule": 1})],
)
def test_on_one_rank_nothing_needs_to_be_reduced(sound: Sound, cell: str, wrappers: dict[str, int]) -> None:
    story = sound(cell).model({"wrappers": wrappers})
    assert story.findings("active") == []


@pytest.mark.parametrize(
    ("cell", "wrappers", "finding"),
    [
        ("ddp-fp32-w1", {"FSDP2": 3}, "Toy runs as FSDP2 x 3; expected DDP for ddp"),
        ("ddp-fp32-w2", {}, "Toy runs as a bare model; expected DDP for ddp"),
        ("ddp-fp32-w2-compile", {"OptimizedModule": 1}, "Toy runs as OptimizedModule x 1; expected DDP for ddp"),
        ("fsdp1-fp32-w1", {}, "Toy runs as a bare model; expected FSDP1 for fsdp1"),
        ("fsdp2-fp32-w1", {}, "Toy runs as a bare model; expected FSDP2 for fsdp2"),
    ],
)
def test_another_strategy_is_found_on_one_rank_too(
    sound: Sound, cell: str, wrappers: dict[str, int], finding: str
) -> None:
    story = sound(cell).model({"wrappers": wrappers}, action="build", rank=0)
    assert story.findings("active") == [f"rank 0: {finding}"]


def test_the_settings_of_torch_stay_as_they_were(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").snapshot("build_model", {"settings": {"threads": "7", "default dtype": "float32"}})
    changed = story.snapshot("step", {"settings": {"threads": "1", "default dtype": "float32"}}, nth=2, rank=1)
    finding = "rank 1: torch's setting 'threads' is 1 after three steps; 7 before the build"
    assert changed.findings("active") == [finding]


@pytest.mark.parametrize(("setting", "count"), [("env.OMP_NUM_THREADS=7", 1), ("TrainingArguments.tf32=true", 0)])
def test_a_setting_of_a_library_may_change_those_of_torch(sound: Sound, setting: str, count: int) -> None:
    story = sound(f"ddp-fp32-w2-set_{setting}").snapshot("build_model", {"settings": {"threads": "7"}})
    changed = story.snapshot("step", {"settings": {"threads": "1"}}, nth=2, rank=1)
    assert len(changed.findings("active")) == count
