"""Check ``names`` on hand-made traces: names that do not map back to the unwrapped model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.checks._renamed import renamed
from pytest_distcompat.checks._saved_names import NO_READABLE_FILE
from pytest_distcompat.model_values import values
from pytest_distcompat.trace import FileInfo, StandIn

if TYPE_CHECKING:
    from tests.checks.traces import Sound, Story

    from pytest_distcompat.trace import Snapshot

CELLS = ("ddp-fp32-w2", "fsdp2-fp32-w2", "zero1-fp32-w2", "zero3-fp32-w2")


@pytest.mark.parametrize(
    ("cell", "live", "maps_to"),
    [
        # Segments of a wrapper that the cell does not ask for.
        ("fsdp2-fp32-w2", "_orig_mod.outlet.weight", "_orig_mod.outlet.weight"),
        ("fsdp2-fp32-w2", "_fsdp_wrapped_module.outlet.weight", "_fsdp_wrapped_module.outlet.weight"),
        ("fsdp2-fp32-w2", "module.outlet.weight", "module.outlet.weight"),
        ("ddp-fp32-w2", "module.module.outlet.weight", "module.outlet.weight"),
        ("zero1-fp32-w2", "module._orig_mod.outlet.weight", "_orig_mod.outlet.weight"),
        ("fsdp1-fp32-w2", "outlet._checkpoint_wrapped_module.weight", "outlet._checkpoint_wrapped_module.weight"),
        ("ddp-fp32-w2", "module.output.weight", "output.weight"),
    ],
)
def test_a_live_name_that_maps_to_nothing(sound: Sound, cell: str, live: str, maps_to: str) -> None:
    story = sound(cell).renamed("outlet.weight", live, action="step", nth=2, rank=1)
    of_ranks = [finding for finding in story.findings("names") if finding.startswith("rank")]
    assert of_ranks == [
        f"rank 1: live parameter {live!r} maps to {maps_to!r}, which is no name of the unwrapped model",
        "rank 1: parameter 'outlet.weight' of the unwrapped model has no live counterpart",
    ]


@pytest.mark.parametrize(
    ("cell", "live"),
    [
        ("fsdp2-fp32-w2-compile", "_orig_mod.outlet.weight"),
        ("ddp-fp32-w2-compile", "module._orig_mod.outlet.weight"),
        ("fsdp1-fp32-w2", "_fsdp_wrapped_module.outlet._fsdp_wrapped_module.weight"),
        ("fsdp2-fp32-w2-activation_checkpointing", "outlet._checkpoint_wrapped_module.weight"),
        ("zero3-fp32-w2", "outlet.weight"),
    ],
)
def test_the_cells_own_segments_are_taken_off(sound: Sound, cell: str, live: str) -> None:
    story = sound(cell).renamed("outlet.weight", live)
    assert story.findings("names") == []


def test_a_tied_parameter_may_live_under_either_name(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").renamed("inlet.weight", "head.weight")
    assert story.findings("names") == []


def test_two_live_parameters_of_one_name(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").renamed("outlet.weight", "inlet.weight", action="step", nth=2)
    assert "rank 0: 2 live parameters map to 'inlet.weight'; expected one" in story.findings("names")


def test_flat_parameters_have_no_names(sound: Sound) -> None:
    story = sound("fsdp1-fp32-w2").renamed("outlet.weight", "_flat_param")
    assert story.parameters({"kind": "FlatParameter"}).findings("names") == []


def without_outlet(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot without the last parameter of the live model."""
    assert snapshot.model is not None
    inlet, frozen, _ = snapshot.model.parameters
    return replace(snapshot, model=replace(snapshot.model, parameters=(inlet, frozen)))


def test_a_live_parameter_is_missing(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").alter(without_outlet, action="step", nth=2, rank=0)
    assert story.findings("names") == [
        "rank 0: parameter 'outlet.weight' of the unwrapped model has no live counterpart"
    ]


def test_a_live_parameter_is_missing_in_a_simulation(sound: Sound) -> None:
    def stands_for_itself(snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, stand_in=StandIn("simulated", (snapshot.rank,), steps=1))

    # A simulation takes one step.
    story = sound("fsdp2-fp32-w2").alter(stands_for_itself)
    story = story.alter(without_outlet, action="step", nth=0, rank=0)
    assert story.findings("names") == [
        "rank 0: parameter 'outlet.weight' of the unwrapped model has no live counterpart"
    ]


def test_no_model(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").snapshot("step", {"model": None}, nth=2, rank=1)
    assert story.findings("names") == ["rank 1: no model to read names from"]


def test_no_unwrapped_model(sound: Sound) -> None:
    expected = ["the unwrapped model was not recorded"]
    silent = sound("ddp-fp32-w2").without("build_model")
    assert silent.findings("names") == expected
    empty = sound("ddp-fp32-w2").snapshot("build_model", {"unwrapped": None})
    assert empty.findings("names") == expected


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp2-fp32-w2"])
def test_no_rank_keeps_state_for_a_parameter(sound: Sound, cell: str) -> None:
    def without_state(snapshot: Snapshot) -> Snapshot:
        assert snapshot.optimizer is not None
        states = tuple(state for state in snapshot.optimizer.states if "outlet" not in state.owner)
        return replace(snapshot, optimizer=replace(snapshot.optimizer, states=states))

    story = sound(cell)
    # One rank may hold no element of it.
    changed = story.alter(without_state, action="step", nth=2, rank=0)
    assert changed.findings("names") == []
    changed = story.alter(without_state, action="step", nth=2)
    assert changed.findings("names") == ["the optimizer of no rank keeps state for 'outlet.weight'"]


@pytest.mark.parametrize("cell", ["zero1-fp32-w2", "zero3-fp32-w2"])
def test_no_rank_holds_masters_of_a_parameter(sound: Sound, cell: str) -> None:
    masters = {"module.inlet.weight": 4, "module.outlet.weight": 0}
    story = sound(cell)
    changed = story.optimizer({"partitioned": masters}, action="step", nth=2, rank=0)
    assert changed.findings("names") == []
    changed = story.optimizer({"partitioned": masters}, action="step", nth=2)
    assert changed.findings("names") == ["the optimizer of no rank keeps state for 'outlet.weight'"]


def test_state_under_a_name_that_is_no_trainable_parameters(sound: Sound) -> None:
    story = sound("zero1-fp32-w2")
    masters = {
        story.live("inlet.weight"): 4,
        story.live("outlet.weight"): 4,
        story.live("frozen.weight"): 16,
    }
    changed = story.optimizer({"partitioned": masters}, action="step", nth=2, rank=1)
    assert changed.findings("names") == [
        "the optimizer keeps state for 'frozen.weight', which is no trainable parameter of the unwrapped model"
    ]


def test_no_optimizer(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").snapshot("step", {"optimizer": None}, nth=2, rank=1)
    assert story.findings("names") == ["rank 1: no optimizer to read names from"]


@pytest.mark.parametrize(
    ("cell", "key", "hint"),
    [
        ("fsdp2-fp32-w2-compile", "_orig_mod.outlet.weight", "; expected 'outlet.weight'"),
        ("fsdp2-fp32-w2", "_orig_mod.outlet.weight", ""),
        ("ddp-fp32-w2", "module.outlet.weight", "; expected 'outlet.weight'"),
        ("zero3-fp32-w2", "module.outlet.weight", "; expected 'outlet.weight'"),
        ("fsdp1-fp32-w2", "outlet._fsdp_wrapped_module.weight", "; expected 'outlet.weight'"),
    ],
)
def test_a_key_in_a_model_file(sound: Sound, cell: str, key: str, hint: str) -> None:
    story = sound(cell).file(0, keys=("inlet.weight", "frozen.weight", "scale", key))
    assert story.findings("names") == [
        f"file 'model.safetensors': key {key!r} is no name of the unwrapped model{hint}",
        "1 of 3 parameters are in no saved file, first 'outlet.weight'",
    ]


WAY_OUT = "; if a library renames them and loads them so, say it by saved_name"


@pytest.mark.parametrize(
    ("prefix", "way_out"), [("_orig_mod.", ""), ("module._orig_mod.", ""), ("net.", WAY_OUT), ("0.net.", WAY_OUT)]
)
def test_keys_with_one_extra_prefix_are_one_finding(sound: Sound, prefix: str, way_out: str) -> None:
    keys = [f"{prefix}{name}" for name in ("inlet.weight", "frozen.weight", "outlet.weight", "scale")]
    story = sound("fsdp2-fp32-w2").file(0, keys=tuple(keys))
    first = f"key '{prefix}frozen.weight' is no name of the unwrapped model; expected 'frozen.weight'{way_out}"
    assert story.findings("names") == [
        f"file 'model.safetensors': 4 keys have the extra prefix `{prefix}`: {first}",
    ]


def test_keys_with_one_extra_segment_are_one_finding(sound: Sound) -> None:
    keys = ("inlet.base.weight", "frozen.weight", "outlet.base.weight", "scale", "other")
    story = sound("fsdp2-fp32-w2").file(0, keys=keys)
    first = f"key 'inlet.base.weight' is no name of the unwrapped model; expected 'inlet.weight'{WAY_OUT}"
    assert story.findings("names") == [
        f"file 'model.safetensors': 2 keys have the extra segment `base.`: {first}",
        "file 'model.safetensors': key 'other' is no name of the unwrapped model",
    ]


def test_keys_that_lack_a_part() -> None:
    known = ("0.model.inlet.weight", "0.model.inlet.bias", "head.weight", "tail.weight")
    (segment,) = renamed(("0.inlet.weight", "0.inlet.bias", "strange"), known)
    assert str(segment) == "2 keys lack the segment `model.`"
    assert segment.names == {"0.inlet.bias": "0.model.inlet.bias", "0.inlet.weight": "0.model.inlet.weight"}
    (prefix,) = renamed(("inlet.weight", "inlet.bias"), known)
    assert str(prefix) == "2 keys lack the prefix `0.model.`"
    assert prefix.way_out == WAY_OUT
    # The end of several names is none of them, and one key alone is no group.
    assert renamed(("weight", "bias"), known) == []
    assert renamed(("inlet.weight",), known) == []


@pytest.mark.parametrize(
    ("key", "finding"),
    [
        (
            "module.outlet.weight",
            "key 'module.outlet.weight' is no name of the unwrapped model; expected 'outlet.weight'",
        ),
        # Names of the unwrapped model, but nothing that an optimizer has state of.
        ("frozen.weight", "key 'frozen.weight' is no name of the unwrapped model"),
        ("scale", "key 'scale' is no name of the unwrapped model"),
    ],
)
def test_a_key_in_an_optimizer_file(sound: Sound, key: str, finding: str) -> None:
    story = sound("ddp-fp32-w2").file(1, keys=("inlet.weight", "outlet.weight", key))
    assert story.findings("names") == [f"file 'optimizer.bin': {finding}"]


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp2-fp32-w2"])
@pytest.mark.parametrize("broadcast", [True, False])
def test_ranks_make_unlike_models(runs_of: Callable[[str, str], Story], cell: str, broadcast: bool) -> None:
    def drawn(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        parameters = []
        for info in snapshot.unwrapped.parameters:
            digest = f"8:{snapshot.rank + 1}"
            if broadcast and snapshot.rank == 0:
                digest = built[info.name][0]
            parameters.append(replace(info, digest=digest))
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, parameters=tuple(parameters)))

    story = runs_of(cell, "export")
    train = story.trace.run()
    built = values(train, train.at("build")).of("parameter")
    findings = story.alter(drawn, action="build_model").findings("names")
    values_of = "build_model() gives each rank other values of 'frozen.weight' and 2 others, and build() not those of rank 0 to all"
    expected = f"{values_of}: ranks hold parts of unlike models; seed all alike, or broadcast"
    if broadcast:
        assert findings == []
    else:
        assert findings == [expected]


@pytest.mark.parametrize(("key", "wrong"), [("cpu", False), ("shadow.outlet.weight", True), ("weight", True)])
def test_a_file_of_other_tensors_beside_the_model(sound: Sound, key: str, wrong: bool) -> None:
    def beside(snapshot: Snapshot) -> Snapshot:
        file = FileInfo("rng.pt", "torch", "model", (key,))
        return replace(snapshot, files=(*snapshot.files, file))

    story = sound("ddp-fp32-w2").alter(beside, action="files", rank=0)
    findings = story.findings("names")
    if wrong:
        assert findings == [f"file 'rng.pt': key {key!r} is no name of the unwrapped model"]
    else:
        assert findings == []


def test_a_tied_parameter_may_be_saved_under_either_name(sound: Sound) -> None:
    story = sound("zero3-fp32-w2").file(0, keys=("head.weight", "frozen.weight", "outlet.weight", "scale"))
    changed = story.file(1, keys=("head.weight", "outlet.weight"))
    assert changed.findings("names") == []


@pytest.mark.parametrize("cell", CELLS)
def test_nothing_was_saved(sound: Sound, cell: str) -> None:
    for story in (sound(cell).snapshot("files", {"files": ()}), sound(cell).without("files")):
        assert story.findings("names") == [
            "3 of 3 parameters are in no saved file, first 'frozen.weight', 'inlet.weight', 'outlet.weight'",
            "1 of 1 persistent buffers are in no saved file, first 'scale'",
            NO_READABLE_FILE,
        ]


def test_an_optimizer_file_holds_no_model(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").file(0, keys=("outlet.weight",), holds="optimizer")
    assert story.findings("names") == [
        "3 of 3 parameters are in no saved file, first 'frozen.weight', 'inlet.weight', 'outlet.weight'",
        "1 of 1 persistent buffers are in no saved file, first 'scale'",
        NO_READABLE_FILE,
    ]


@pytest.mark.parametrize("cell", CELLS)
def test_a_buffer_was_not_saved(sound: Sound, cell: str) -> None:
    story = sound(cell).file(0, keys=("inlet.weight", "frozen.weight", "outlet.weight"))
    assert story.findings("names") == ["1 of 1 persistent buffers are in no saved file, first 'scale'"]


def test_state_of_a_parameter_was_not_saved(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").file(1, keys=("inlet.weight",))
    assert story.findings("names") == [
        "1 of 2 trainable parameters' optimizer states are in no saved file, first 'outlet.weight'"
    ]
    # Some formats number their parameters: no key is no claim.
    changed = sound("fsdp2-fp32-w2").file(1, keys=())
    assert changed.findings("names") == []


def test_a_saved_tensor_of_another_shape(sound: Sound) -> None:
    story = sound("zero3-fp32-w2").file(0, shapes={"outlet.weight": (1, 4), "head.weight": (4, 2)})
    assert story.findings("names") == [
        "file 'model.safetensors': 'outlet.weight' has shape (1, 4); (2, 4) in the unwrapped model"
    ]


def test_a_saved_tensor_that_is_neither_parameter_nor_buffer(sound: Sound) -> None:
    # Module.get_extra_state() may return a tensor; state_dict() has it under "_extra_state".
    def with_extra(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        keys = (*snapshot.unwrapped.state_dict, "outlet._extra_state")
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, state_dict=keys))

    story = sound("ddp-fp32-w2").alter(with_extra, action="build_model")
    keys = ("inlet.weight", "frozen.weight", "outlet.weight", "scale", "outlet._extra_state")
    changed = story.file(0, keys=keys)
    assert changed.findings("names") == []
    changed = story.file(0, keys=keys, shapes={"outlet._extra_state": (3,)})
    assert changed.findings("names") == []


def test_a_parameter_that_a_hook_of_the_model_saves_under_other_names(sound: Sound) -> None:
    # torchtitan's fused projection is in the state dict, and so in files, as those that it is fused of.
    halves = ("outlet.upper.weight", "outlet.lower.weight")

    def fused(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        others = [name for name in snapshot.unwrapped.state_dict if name != "outlet.weight"]
        state_dict = (*others, *halves)
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, state_dict=state_dict))

    story = sound("fsdp2-fp32-w2").alter(fused, action="build_model")
    others = ("inlet.weight", "frozen.weight", "scale")
    changed = story.file(0, keys=(*others, *halves))
    assert changed.findings("names") == []
    changed = story.file(0, keys=(*others, halves[0]))
    assert changed.findings("names") == ["1 of 4 parameters are in no saved file, first 'outlet.lower.weight'"]


def test_names_that_the_library_writes(sound: Sound) -> None:
    """As transformers' experts, which are one tensor in memory and one each in files."""
    written = ("inlet.weight", "frozen.weight", "outlet.0.weight", "outlet.1.weight", "scale")

    def renamed(snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, unwrapped=snapshot.unwrapped and replace(snapshot.unwrapped, written_names=written))

    story = sound("ddp-fp32-w2").alter(renamed, action="build_model")
    assert story.findings("names") == []
    changed = story.file(0, keys=written)
    assert changed.findings("names") == []
    changed = story.file(0, keys=written[1:])
    assert changed.findings("names") == [
        "1 of 5 names that the library writes are in no saved file, first 'inlet.weight'"
    ]
    changed = story.file(0, keys=written[:3])
    assert changed.findings("names") == [
        "2 of 5 names that the library writes are in no saved file, first 'outlet.1.weight', 'scale'"
    ]
    changed = story.file(0, keys=("inlet.weight", "frozen.weight", "scale"))
    assert changed.findings("names") == ["1 of 3 parameters are in no saved file, first 'outlet.weight'"]


@pytest.mark.parametrize("cell", CELLS)
def test_a_live_parameter_of_another_shape(sound: Sound, cell: str) -> None:
    story = sound(cell)
    other = story.parameters({"shape": (1, 4)}, only="outlet.weight", action="step", nth=2, rank=1)
    assert other.findings("names") == [
        f"rank 1: live parameter {story.live('outlet.weight')!r} has shape (1, 4); (2, 4) in the unwrapped model"
    ]


def test_a_flat_shard_has_a_shape_of_its_own(sound: Sound) -> None:
    story = sound("fsdp1-fp32-w2").parameters({"shape": (4,)})
    assert story.findings("names") == []


def test_a_rank_is_silent(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").without("step", nth=2, rank=1)
    assert story.findings("names") == ["rank 1: no report after three steps"]
