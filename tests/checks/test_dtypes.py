"""Check ``dtypes`` on hand-made traces: storage, compute, reduction or optimizer in another dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.trace import CollectiveInfo, StepInfo

if TYPE_CHECKING:
    from tests.checks.traces import Sound

    from pytest_distcompat.trace import Snapshot


@pytest.mark.parametrize(
    ("cell", "actual", "expected"),
    [
        ("ddp-bf16_upcast-w2", "bfloat16", "float32"),
        ("fsdp2-bf16_upcast-w2", "bfloat16", "float32"),
        ("zero1-bf16_upcast-w2", "float32", "bfloat16"),
        ("zero3-bf16_pure-w2", "float32", "bfloat16"),
    ],
)
def test_storage(sound: Sound, cell: str, actual: str, expected: str) -> None:
    story = sound(cell)
    name = story.live("outlet.weight")
    wrong = story.parameters({"dtype": actual}, only="outlet.weight", action="step", nth=2, rank=1)
    assert wrong.findings("dtypes") == [
        f"rank 1: 1 of 2 trainable parameters are stored in {actual}, first {name!r}; expected {expected}"
    ]


def test_a_complex_parameter_has_the_dtype_of_its_parts(sound: Sound) -> None:
    """complex64 is two float32, as a rotary embedding or a spectral layer has them."""
    story = sound("ddp-fp32-w2")
    for dtype, message in (("complex64", ""), ("complex128", "stored in complex128")):
        changed = story.parameters({"dtype": dtype}, only="outlet.weight", action="step", nth=2)
        findings = changed.findings("dtypes")
        assert bool(findings) == bool(message)
        for finding in findings:
            assert message in finding


@pytest.mark.parametrize(("only", "changes"), [("frozen.weight", {}), ("outlet.weight", {"local_numel": 0})])
def test_frozen_and_empty_parameters_may_have_another_storage_dtype(
    sound: Sound, only: str, changes: dict[str, Any]
) -> None:
    story = sound("fsdp2-bf16_upcast-w2").parameters({"dtype": "bfloat16", **changes}, only=only, action="step")
    assert story.findings("dtypes") == []


@pytest.mark.parametrize("cell", ["ddp-bf16_upcast-w2", "fsdp2-bf16_upcast-w2", "zero3-bf16_upcast-w2"])
def test_a_frozen_parameter_that_is_wider_than_it_was_loaded(sound: Sound, cell: str) -> None:
    story = sound(cell)
    wrong = story.parameters({"dtype": "float32"}, only="frozen.weight", action="step", nth=2, rank=1)
    name = story.live("frozen.weight")
    (finding,) = wrong.findings("dtypes")
    assert finding.startswith("rank 1: 1 of ")
    assert f"frozen parameters are stored in float32, first {name!r}; loaded in bfloat16" in finding


def test_in_one_flat_parameter_all_have_the_dtype_of_what_is_trained(sound: Sound) -> None:
    story = sound("fsdp1-bf16_upcast-w2").parameters({"dtype": "float32"}, only="frozen.weight", action="step", nth=2)
    changed = story.model({"units": ("",)}, action="step", nth=2)
    assert changed.findings("dtypes") == []
    # In a unit of its own it need not be.
    first, *_ = story.findings("dtypes")
    assert "frozen parameters are stored in float32" in first


@pytest.mark.parametrize(
    ("cell", "actual", "expected"),
    [
        ("zero1-bf16_upcast-w2-grad_accum_dtype_fp32", "bfloat16", "float32"),
        ("zero2-bf16_upcast-w2", "float32", "bfloat16"),
        ("zero3-fp32-w2", "bfloat16", "float32"),
    ],
)
def test_accumulation_of_gradients(sound: Sound, cell: str, actual: str, expected: str) -> None:
    story = sound(cell)
    wrong = story.optimizer({"accumulates": actual}, action="step", nth=2, rank=1)
    assert wrong.findings("dtypes") == [f"rank 1: gradients are added up in {actual}; expected {expected}"]
    changed = story.optimizer({"accumulates": expected}, action="step", nth=2)
    assert changed.findings("dtypes") == []


@pytest.mark.parametrize(
    ("cell", "actual", "expected"),
    [
        ("ddp-bf16_upcast-w2", "bfloat16", "float32"),
        ("zero2-bf16_upcast-w2", "bfloat16", "float32"),
        ("fsdp1-bf16_upcast-w2", "float32", "bfloat16"),
        ("fsdp2-fp32-w2", "float64", "float32"),
    ],
)
def test_buffers(sound: Sound, cell: str, actual: str, expected: str) -> None:
    story = sound(cell)
    wrong = story.buffers({"dtype": actual}, action="step", nth=2, rank=0)
    assert wrong.findings("dtypes") == [f"rank 0: 1 buffers are in {actual}, first 'scale'; expected {expected}"]


@pytest.mark.parametrize(
    ("cell", "findings"),
    [
        ("fsdp2-bf16_upcast-w2", []),
        ("ddp-bf16_upcast-w2", []),
        # Their parameters are in bfloat16: nothing was upcast.
        ("fsdp2-bf16_pure-w2", ["rank 0: 1 buffers are in float32, first 'scale'; expected bfloat16"]),
        # FSDP1 casts buffers.
        ("fsdp1-bf16_upcast-w2", ["rank 0: 1 buffers are in float32, first 'scale'; expected bfloat16"]),
    ],
)
def test_buffers_that_are_upcast_with_the_parameters(sound: Sound, cell: str, findings: list[str]) -> None:
    def loaded_in_bfloat16(snapshot: Snapshot) -> Snapshot:
        if snapshot.unwrapped is None:
            return snapshot
        buffers = tuple(replace(info, dtype="bfloat16") for info in snapshot.unwrapped.buffers)
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, buffers=buffers))

    story = sound(cell).alter(loaded_in_bfloat16, action="build_model")
    story = story.buffers({"dtype": "bfloat16"}, action="step", nth=2, rank=1)
    story = story.buffers({"dtype": "float32"}, action="step", nth=2, rank=0)
    assert [text for text in story.findings("dtypes") if "buffers" in text] == findings


@pytest.mark.parametrize(
    ("cell", "outputs", "text"),
    [
        ("ddp-bf16_upcast-w2", ("float32",), "float32; expected bfloat16"),
        ("fsdp2-bf16_upcast-w2", ("bfloat16", "float32"), "bfloat16 and float32; expected bfloat16"),
        ("zero3-fp32-w2", ("bfloat16",), "bfloat16; expected float32"),
        # Nothing seen is no proof.
        ("zero1-fp32-w2", (), "nothing; expected float32"),
    ],
)
def test_compute(sound: Sound, cell: str, outputs: tuple[str, ...], text: str) -> None:
    story = sound(cell).snapshot("step", {"compute": outputs}, nth=2, rank=0)
    assert story.findings("dtypes") == [f"rank 0: matrix products ran in {text}"]


@pytest.mark.parametrize(
    ("cell", "op", "actual", "expected"),
    [
        ("ddp-bf16_upcast-w2", "allreduce", "bfloat16", "float32"),
        ("fsdp2-bf16_upcast-w2", "reduce_scatter_base", "float32", "bfloat16"),
        ("fsdp1-bf16_upcast-w2", "allreduce", "float32", "bfloat16"),
        ("zero1-bf16_upcast-w2", "allreduce", "float32", "bfloat16"),
        ("zero3-bf16_upcast-w2", "reduce_scatter_tensor_coalesced", "float32", "bfloat16"),
        ("fsdp2-bf16_upcast-w2-reduce_dtype_fp32", "reduce_scatter_base", "bfloat16", "float32"),
        ("fsdp1-fp16_mixed-w2-reduce_dtype_fp32", "reduce_scatter_base", "float16", "float32"),
        ("zero2-bf16_upcast-w2-reduce_dtype_fp32", "allreduce", "bfloat16", "float32"),
    ],
)
def test_gradients_on_the_wire(sound: Sound, cell: str, op: str, actual: str, expected: str) -> None:
    story = sound(cell)
    assert story.findings("dtypes") == []
    reduction = CollectiveInfo(op, actual, 1, 16)
    story = story.snapshot("step", {"collectives": (reduction,)}, nth=2, rank=1)
    assert story.findings("dtypes") == [f"rank 1: gradients were reduced in {actual}; expected {expected}"]


@pytest.mark.parametrize(("actual", "is_wider"), [("float32", True), ("float16", False), ("float8_e4m3fn", False)])
def test_without_reduce_dtype_gradients_may_travel_in_a_wider_dtype(sound: Sound, actual: str, is_wider: bool) -> None:
    """Lightning's Fabric puts autocast around FSDP2, whose parameters, and so gradients, are float32 then."""
    reduction = CollectiveInfo("reduce_scatter_base", actual, 1, 16)
    story = sound("fsdp2-bf16_upcast-w2").snapshot("step", {"collectives": (reduction,)}, nth=2)
    assert story.findings("dtypes") != []
    without_option = story.unwrapped({"obeyed": ("compile",)})
    findings = without_option.findings("dtypes")
    if is_wider:
        assert findings == []
    else:
        assert findings != []
    silent = without_option.snapshot("step", {"collectives": ()}, nth=2, rank=0)
    first, *_ = silent.findings("dtypes")
    assert first == "rank 0: gradients were reduced in nothing; expected bfloat16"


@pytest.mark.parametrize("cell", ["ddp-bf16_upcast-w2", "zero1-bf16_upcast-w2"])
@pytest.mark.parametrize("numel", [1, 3])
def test_metrics_are_no_gradients(sound: Sound, cell: str, numel: int) -> None:
    # Half of the smallest trainable parameter has four elements.
    story = sound(cell)
    sent = story.trace.run().at("step", 2)[0].collectives
    for dtype in ("float32", "bfloat16", "float64"):
        metric = CollectiveInfo("allreduce", dtype, 5, numel)
        changed = story.snapshot("step", {"collectives": (*sent, metric)}, nth=2)
        assert changed.findings("dtypes") == []


def test_without_an_unwrapped_model_all_but_flags_are_gradients(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").without("build_model")
    assert story.findings("dtypes") == []
    metric = CollectiveInfo("allreduce", "bfloat16", 1, 2)
    changed = story.snapshot("step", {"collectives": (metric,)}, nth=2, rank=0)
    assert changed.findings("dtypes") == ["rank 0: gradients were reduced in bfloat16; expected float32"]


def test_one_rank_alone_sends_nothing(sound: Sound) -> None:
    story = sound("ddp-fp32-w1").snapshot("step", {"collectives": ()})
    assert story.findings("dtypes") == []
    story = sound("ddp-fp32-w2").snapshot("step", {"collectives": ()})
    assert story.findings("dtypes") == [
        "rank 0: gradients were reduced in nothing; expected float32",
        "rank 1: gradients were reduced in nothing; expected float32",
    ]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("master", "AdamW updates bfloat16 masters; expected float32"),
        ("gradient", "AdamW is given gradients in bfloat16; expected float32"),
        ("state", "AdamW keeps state in bfloat16; expected float32"),
    ],
)
@pytest.mark.parametrize(
    "cell", ["ddp-bf16_upcast-w2", "fsdp2-bf16_upcast-w2", "zero1-bf16_upcast-w2", "zero3-bf16_upcast-w2"]
)
def test_masters_and_state_of_the_optimizer(sound: Sound, cell: str, part: str, text: str) -> None:
    story = sound(cell).stepped({part: ("bfloat16",)}, action="step", nth=2, rank=1)
    assert story.findings("dtypes") == [f"rank 1: {text}"]


def test_two_dtypes_in_one_optimizer(sound: Sound) -> None:
    story = sound("fsdp2-bf16_upcast-w2").stepped({"state": ("bfloat16", "float32")}, action="step", nth=2, rank=0)
    assert story.findings("dtypes") == ["rank 0: AdamW keeps state in bfloat16 and float32; expected float32"]


def test_every_step_in_a_step_counts(sound: Sound) -> None:
    good = StepInfo("AdamW", ("float32",), ("float32",), ("float32",))
    other = StepInfo("SGD", ("bfloat16",), ("float32",), ("float32",))
    story = sound("ddp-bf16_upcast-w2").snapshot("step", {"steps": (good, other)}, nth=2, rank=0)
    assert story.findings("dtypes") == ["rank 0: SGD updates bfloat16 masters; expected float32"]


def test_a_rank_that_holds_nothing_steps_on_nothing(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").stepped({"master": (), "gradient": (), "state": ()}, action="step", rank=1)
    assert story.findings("dtypes") == [
        "rank 1: AdamW updates nothing; expected float32",
        "rank 1: AdamW is given gradients in nothing; expected float32",
        "rank 1: AdamW keeps state in nothing; expected float32",
    ]
    empty = story.parameters({"local_numel": 0}, rank=1)
    assert empty.findings("dtypes") == []


def test_pure_bfloat16_is_pure(sound: Sound) -> None:
    # The silent upcast: everything is right but the dtype of the masters.
    story = sound("fsdp1-bf16_pure-w2").stepped({"master": ("float32",)}, action="step", nth=2, rank=0)
    assert story.findings("dtypes") == ["rank 0: AdamW updates float32 masters; expected bfloat16"]


def test_no_optimizer_stepped(sound: Sound) -> None:
    story = sound("zero1-fp32-w2").snapshot("step", {"steps": ()}, nth=2, rank=1)
    assert story.findings("dtypes") == ["rank 1: no optimizer stepped"]


def test_a_rank_is_silent(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").without("step", nth=2, rank=0)
    assert story.findings("dtypes") == ["rank 0: no report after three steps"]


@pytest.mark.parametrize("cell", ["fsdp2-fp32-w2-compile_aot_eager", "fsdp2-bf16_upcast-w2"])
def test_float32_is_not_multiplied_in_tf32_since_the_build(sound: Sound, cell: str) -> None:
    in_tf32 = {"matmul": "tf32", "conv": "tf32"}
    story = sound(cell).alter(lambda snapshot: replace(snapshot, products=in_tf32))
    # The user's own setting, which was there before.
    assert story.findings("dtypes") == []
    since = story.snapshot("build_model", {"products": {"matmul": "ieee", "conv": "tf32"}})
    findings = since.findings("dtypes")
    if "fp32" in cell:
        message = "products of float32 are in TF32 since build"
        assert findings == [f"rank 0: {message}", f"rank 1: {message}"]
    else:
        assert findings == []
    # A script's trainer is not seen before it is built.
    changed = story.snapshot("build_model", {"products": {}})
    assert changed.findings("dtypes") == []
