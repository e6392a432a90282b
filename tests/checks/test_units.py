"""Check ``units`` on hand-made traces: other modules are sharded, recomputed or compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.trace import Layout, MeshDim

if TYPE_CHECKING:
    from tests.checks.traces import Sound, Story

    from pytest_distcompat.trace import Snapshot

LAST: dict[str, Any] = {"action": "step", "nth": 2}
CUT = "expected 'inlet', 'outlet', the root, and none inside a block"


def live(story: Story, *modules: str) -> tuple[str, ...]:
    """Modules as this cell calls them; the root is the empty name everywhere."""
    live_modules = []
    for module in modules:
        name = story.live(module) if module else ""
        live_modules.append(name)
    return tuple(live_modules)


@pytest.mark.parametrize("cell", ["fsdp1-fp32-w2", "fsdp2-bf16_upcast-w2", "fsdp2-fp32-w2-compile"])
@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ((), "nothing"),
        (("",), "the root"),
        (("inlet", "outlet"), "'inlet', 'outlet'"),
        (("", "inlet"), "'inlet', the root"),
        (("", "inlet", "outlet", "outlet.inner"), "'inlet', 'outlet', 'outlet.inner', the root"),
    ],
)
def test_fsdp_units_are_the_blocks(sound: Sound, cell: str, modules: tuple[str, ...], message: str) -> None:
    story = sound(cell)
    changed = story.model({"units": live(story, *modules)}, **LAST, rank=1)
    findings = changed.findings("units")
    assert findings == [f"rank 1: FSDP's units are {message}; {CUT}"]


@pytest.mark.parametrize("cell", ["fsdp1-fp32-w2", "fsdp2-fp32-w2"])
def test_other_modules_than_blocks_may_be_units(sound: Sound, cell: str) -> None:
    story = sound(cell)
    changed = story.model({"units": live(story, "", "inlet", "outlet", "frozen")}, **LAST)
    assert changed.findings("units") == []


@pytest.mark.parametrize(("modules", "fine"), [(("",), False), (("", "frozen"), True)])
def test_units_by_size(sound: Sound, modules: tuple[str, ...], *, fine: bool) -> None:
    story = sound("fsdp2-fp32-w2-wrap_policy_size")
    changed = story.model({"units": modules}, **LAST, rank=0)
    findings = changed.findings("units")
    message = "rank 0: FSDP has one unit for the whole model; expected one for each part that is large enough"
    assert findings == [message] * (not fine)


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "zero3-fp32-w2", "fsdp1-fp32-w2", "fsdp2-fp32-w2"])
@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ((), "nothing"),
        (("inlet",), "'inlet'"),
        (("inlet.inner", "outlet.inner"), "'inlet.inner', 'outlet.inner'"),
        (("inlet", "outlet", "outlet.inner"), "'inlet', 'outlet', 'outlet.inner'"),
    ],
)
def test_recomputed_modules_are_the_blocks(sound: Sound, cell: str, modules: tuple[str, ...], message: str) -> None:
    story = with_inner(sound(f"{cell}-activation_checkpointing"))
    changed = story.model({"checkpointed": live(story, *modules)}, **LAST, rank=0)
    findings = changed.findings("units")
    assert findings == [f"rank 0: the activations are recomputed of {message}; expected 'inlet', 'outlet'"]


def with_inner(story: Story) -> Story:
    """Return the modules with one more inside each block."""

    def change(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        inner = tuple(replace(info, name=info.name.replace(".", ".inner.")) for info in snapshot.unwrapped.parameters)
        return replace(
            snapshot, unwrapped=replace(snapshot.unwrapped, parameters=(*snapshot.unwrapped.parameters, *inner))
        )

    return story.alter(change, action="build_model")


def test_recomputing_without_the_option_is_a_finding(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").model({"checkpointed": ("inlet",)}, **LAST, rank=1)
    assert story.findings("units") == [
        "rank 1: the activations of 'inlet' are recomputed without activation_checkpointing"
    ]


def test_a_parent_of_blocks_may_be_marked_as_recomputing(sound: Sound) -> None:
    # transformers marks the module that holds the layers.
    story = sound("ddp-fp32-w2-activation_checkpointing")
    live_names = (*live(story, "inlet", "outlet"), "module", "")
    changed = story.model({"checkpointed": live_names}, **LAST)
    assert changed.findings("units") == []


@pytest.mark.parametrize("how", ["compile", "compile_aot_eager", "compile_regional", "compile_partial"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_model_that_runs_uncompiled(sound: Sound, strategy: str, how: str) -> None:
    story = sound(f"{strategy}-fp32-w2-{how}").model({"graphs": 0}, **LAST, rank=1)
    assert story.findings("units") == ["rank 1: torch.compile made no graph in three steps: the model runs uncompiled"]


@pytest.mark.parametrize(
    ("how", "modules", "message"),
    [
        ("compile", (), "nothing is wrapped by torch.compile"),
        ("compile_aot_eager", (), "nothing is wrapped by torch.compile"),
        ("compile_regional", ("",), "what is compiled is the root; expected each of 'inlet', 'outlet'"),
        ("compile_regional", ("inlet",), "what is compiled is 'inlet'; expected each of 'inlet', 'outlet'"),
        ("compile_partial", ("",), "what is compiled is the root; expected one of the blocks"),
        ("compile_partial", ("frozen",), "what is compiled is 'frozen'; expected one of the blocks"),
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1"])
def test_compiled_modules_are_those_of_the_option(
    sound: Sound, strategy: str, how: str, modules: tuple[str, ...], message: str
) -> None:
    story = sound(f"{strategy}-fp32-w2-{how}")
    changed = story.model({"compiled": live(story, *modules)}, **LAST, rank=0)
    findings = changed.findings("units")
    assert findings == [f"rank 0: {message}"]


@pytest.mark.parametrize(("cell", "kind"), [("fsdp1-fp32-w2", "FSDP1 shard"), ("fsdp2-fp32-w2", "DTensor")])
def test_ignored_modules_are_not_sharded(sound: Sound, cell: str, kind: str) -> None:
    layout = Layout((MeshDim("dp_shard", 2, 1, "Shard(0)"),), (0, 1))
    changes = {"kind": kind, "local_numel": 8, "layout": layout}
    story = sound(f"{cell}-ignored_modules").parameters(changes, only="frozen.weight", **LAST, rank=1)
    assert story.findings("units") == [
        f"rank 1: 'frozen.weight' is sharded ({kind}, dp_shard=Shard(0)); it was to be left out of the sharding"
    ]


def test_a_trained_layer_of_a_frozen_block_may_be_a_unit_apart(sound: Sound) -> None:
    """As PEFT wraps adapters under FSDP1; where all of a block is trained it would be a child for itself."""

    def freeze(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        parameters = (
            replace(parameter, trainable=".inner" in parameter.name) for parameter in snapshot.unwrapped.parameters
        )
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, parameters=tuple(parameters)))

    story = with_inner(sound("fsdp1-fp32-w2"))
    cut = live(story, "", "inlet", "inlet.inner", "outlet")
    message = f"FSDP's units are 'inlet', 'inlet.inner', 'outlet', the root; {CUT}"
    changed = story.model({"units": cut}, **LAST, rank=0)
    assert changed.findings("units") == [f"rank 0: {message}"]
    changed = story.alter(freeze, action="build_model").model({"units": cut}, **LAST)
    assert changed.findings("units") == []


def test_a_block_inside_a_block_is_one(sound: Sound) -> None:
    story = with_blocks(with_inner(sound("fsdp2-fp32-w2")), "inlet", "inlet.inner", "outlet")
    changed = story.model({"units": ("", "inlet", "inlet.inner", "outlet")}, **LAST)
    assert changed.findings("units") == []


@pytest.mark.parametrize(
    "cell",
    [
        "fsdp1-fp32-w2",
        "fsdp2-fp32-w2",
        "ddp-fp32-w2-activation_checkpointing",
        "ddp-fp32-w2-compile_regional",
        "ddp-fp32-w2-compile_partial",
    ],
)
@pytest.mark.parametrize(
    ("classes", "why"),
    [((), "it declares none (_no_split_modules)"), (("Layer", "Head"), "no module of it is a 'Layer' or 'Head'")],
)
def test_blocks_that_nobody_knows(sound: Sound, cell: str, classes: tuple[str, ...], why: str) -> None:
    story = with_blocks(sound(cell), classes=classes)
    assert story.findings("units") == [
        f"the model's blocks are not known: {why}; name their classes by blocks= of launch, or blocks of the driver"
    ]


def test_blocks_need_not_be_known_without_a_block_option(sound: Sound) -> None:
    for cell in ("fsdp2-fp32-w2-wrap_policy_size", "ddp-fp32-w2-compile"):
        assert with_blocks(sound(cell)).findings("units") == []


def test_a_block_that_contains_the_whole_model(sound: Sound) -> None:
    """The modules around the block are in no unit, and the probe did not see them."""
    story = with_blocks(sound("fsdp2-fp32-w2"), "", classes=("Layer",))
    message = "the whole model that was seen is one block, a 'Layer': nothing wraps what is around it"
    changed = story.model({"units": ("",)}, **LAST)
    assert changed.findings("units") == [message]


def test_an_unknown_ignored_module(sound: Sound) -> None:
    def forget(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, ignored_modules=()))

    story = sound("fsdp2-fp32-w2-ignored_modules").alter(forget, action="build_model")
    assert story.findings("units") == ["it is not known which module was to be left out of the sharding"]


def with_blocks(story: Story, *blocks: str, classes: tuple[str, ...] = ()) -> Story:
    """Return the story with these blocks."""

    def change(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, blocks=blocks, block_classes=classes))

    return story.alter(change, action="build_model")


def test_silence_is_no_proof(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").snapshot("build_model", {"unwrapped": None})
    assert story.findings("units") == ["the unwrapped model was not recorded"]
    story = sound("fsdp2-fp32-w2").snapshot("step", {"model": None}, nth=2, rank=0)
    assert story.findings("units") == ["rank 0: no model to read units from"]
    story = sound("fsdp2-fp32-w2").without("step", nth=2, rank=0)
    assert story.findings("units") == ["rank 0: no report after three steps"]


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("ddp-fp32-w2", "ddp cuts no units, and nothing is recomputed or compiled"),
        ("zero3-fp32-w2", "zero3 cuts no units, and nothing is recomputed or compiled"),
        ("zero3-fp32-w2-compile", None),
        ("ddp-fp32-w2-activation_checkpointing", None),
        ("fsdp1-fp32-w2", None),
    ],
)
def test_cells_to_which_it_does_not_apply(sound: Sound, cell: str, reason: str | None) -> None:
    assert CHECKS.get("units").not_applicable(sound(cell).cell, Driver) == reason


KEPT = {"calls": 2, "products": 16}


@pytest.mark.parametrize(
    ("mode", "seen", "message"),
    [
        ("", KEPT | {"products again": 14, "others again": 90}, ""),
        (
            "",
            KEPT | {"others again": 90},
            "blocks computed 0 of 16 matrix products again; expected all but the last of each block",
        ),
        # The only product of a block is its last.
        ("", {"calls": 2, "products": 2, "others again": 9}, ""),
        ("", KEPT, "blocks computed nothing again in the backward pass"),
        # No operators were recorded.
        ("", {}, ""),
        ("_selective", KEPT | {"others again": 90}, ""),
        (
            "_selective",
            KEPT | {"products again": 14, "others again": 90},
            "blocks computed 14 of 16 matrix products again; expected none in selective activation checkpointing",
        ),
        ("_selective", KEPT, "blocks computed nothing again in the backward pass"),
    ],
)
def test_what_is_computed_again(sound: Sound, mode: str, seen: dict[str, int], message: str) -> None:
    story = sound(f"fsdp2-fp32-w2-activation_checkpointing{mode}")
    story = story.snapshot("step", {"recomputed": seen}, nth=2, rank=1)
    assert story.findings("units") == [f"rank 1: {message}"] * bool(message)
