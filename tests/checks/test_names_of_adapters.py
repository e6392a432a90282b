"""Check ``names`` on hand-made traces: buffers, adapters and exports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.model_values import adapter_name
from pytest_distcompat.trace import FileInfo, ModelInfo, ParameterInfo

if TYPE_CHECKING:
    from tests.checks.traces import Sound, Story

    from pytest_distcompat.trace import Snapshot

LORA = ("outlet.lora_A.default.weight", "outlet.lora_B.default.weight")


def with_loose_buffer(story: Story) -> Story:
    """Return the story with a buffer that the model creates itself."""
    loose = ParameterInfo("offset", (4,), "float32", False, digest="4:7")

    def unwrapped(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, buffers=(*snapshot.unwrapped.buffers, loose)))

    def live(model: ModelInfo) -> ModelInfo:
        return replace(model, buffers=(*model.buffers, loose))

    story = story.alter(unwrapped, action="build_model")
    return story.alter(
        lambda snapshot: replace(snapshot, model=snapshot.model and live(snapshot.model)), action="build"
    )


def test_a_buffer_that_is_not_persistent_is_in_no_file(sound: Sound) -> None:
    story = with_loose_buffer(sound("ddp-fp32-w2"))
    assert story.findings("names") == []
    keys = ("inlet.weight", "frozen.weight", "outlet.weight", "scale", "offset")
    changed = story.file(0, keys=keys, shapes={})
    assert changed.findings("names") == ["file 'model.safetensors': holds 'offset', a buffer that is not persistent"]


def live_buffers(story: Story, change: Callable[[ParameterInfo], ParameterInfo]) -> Story:
    def changed(snapshot: Snapshot) -> Snapshot:
        assert snapshot.model is not None
        return replace(snapshot, model=replace(snapshot.model, buffers=tuple(map(change, snapshot.model.buffers))))

    return story.alter(changed, action="build", rank=1)


def test_buffers_keep_their_values_when_built(sound: Sound) -> None:
    story = with_loose_buffer(sound("fsdp2-bf16_upcast-w2"))
    other = live_buffers(story, lambda info: replace(info, digest="4:8"))
    assert other.findings("names") == [
        "rank 1: buffer 'scale' (persistent) has other values after build than in the unwrapped model",
        "rank 1: buffer 'offset' (non-persistent) has other values after build than in the unwrapped model",
    ]
    # In a lower dtype they cannot: that is what the check of dtypes is for.
    rounded = live_buffers(story, lambda info: replace(info, digest="4:8", dtype="bfloat16"))
    assert rounded.findings("names") == []


def test_a_buffer_is_gone(sound: Sound) -> None:
    story = live_buffers(sound("fsdp2-fp32-w2"), lambda info: replace(info, name="other"))
    assert story.findings("names") == ["rank 1: buffer 'scale' of the unwrapped model has no live counterpart"]


def test_exported_adapters_have_unwrapped_names(sound: Sound) -> None:
    def exported(*keys: str) -> list[str]:
        file = FileInfo("export/model.safetensors", "safetensors", "model", keys)
        story = sound("fsdp1-fp32-w2-compile")
        return story.alter(
            lambda snapshot: replace(snapshot, files=(*snapshot.files, file)), action="files", nth=1, rank=0
        ).findings("names")

    # What is not in it is the business of the check ``export``.
    assert exported("outlet.weight") == []
    (finding,) = exported("_orig_mod.outlet.weight")
    assert finding.startswith(
        "file 'export/model.safetensors': key '_orig_mod.outlet.weight' is no name of the unwrapped model"
    )
    assert finding.endswith("; expected 'outlet.weight'")


def adapted(sound: Sound) -> Story:
    """A model whose two trained parameters are an adapter's, saved as PEFT saves it: without all else."""
    story = sound("fsdp2-fp32-w2-lora")
    names = dict(zip(("inlet.weight", "outlet.weight"), LORA, strict=True))
    for old, new in names.items():
        story = story.renamed(old, new)

    def unwrapped(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        parameters = tuple(
            replace(info, name=names.get(info.name, info.name)) for info in snapshot.unwrapped.parameters
        )
        known = (*LORA, "frozen.weight", "scale")
        return replace(
            snapshot, unwrapped=replace(snapshot.unwrapped, parameters=parameters, state_dict=known, tied=())
        )

    story = story.alter(unwrapped, action="build_model")
    story = story.file(0, keys=tuple(map(adapter_name, LORA)), shapes={adapter_name(LORA[0]): (4, 2)})
    return story.file(1, keys=LORA)


def test_an_adapter_may_be_saved_alone_and_without_its_own_name(sound: Sound) -> None:
    assert adapter_name(LORA[0]) == "outlet.lora_A.weight"
    assert adapter_name("outlet.modules_to_save.default.weight") == "outlet.weight"
    assert adapter_name("outlet.lora_magnitude_vector.default.weight") == "outlet.lora_magnitude_vector"
    assert adapted(sound).findings("names") == []
    story = adapted(sound).file(0, keys=(*LORA, "frozen.weight", "scale"))
    assert story.findings("names") == []


@pytest.mark.parametrize("key", ["base.outlet.lora_A.weight", "outlet.lora_A.other.weight"])
def test_an_adapter_under_another_name(sound: Sound, key: str) -> None:
    story = adapted(sound).file(0, keys=(key, "outlet.lora_B.weight"), shapes={})
    assert story.findings("names") == [
        f"file 'model.safetensors': key {key!r} is no name of the unwrapped model",
        f"1 of 2 parameters are in no saved file, first {LORA[0]!r}",
    ]


def test_what_the_layers_of_an_adapter_share_is_saved_once(sound: Sound) -> None:
    """VeRA's projections are buffers of each layer, and one key of the file."""
    shared = "base_model.model.layers.1.q_proj.vera_A.default"

    def rename(info: ParameterInfo) -> ParameterInfo:
        return replace(info, name=shared) if info.name.endswith("scale") else info

    def with_shared(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        buffers = tuple(map(rename, snapshot.unwrapped.buffers))
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, buffers=buffers))

    def with_live(snapshot: Snapshot) -> Snapshot:
        if snapshot.model is None:
            return snapshot
        return replace(snapshot, model=replace(snapshot.model, buffers=tuple(map(rename, snapshot.model.buffers))))

    story = adapted(sound).alter(with_shared, action="build_model").alter(with_live)
    saved = tuple(map(adapter_name, LORA))
    for key, findings in (
        ("base_model.vera_A", []),
        ("base_model.vera_B", ["file 'model.safetensors': key 'base_model.vera_B' is no name of the unwrapped model"]),
    ):
        assert story.file(0, keys=(*saved, key), shapes={}).findings("names") == findings


def test_an_adapter_of_another_shape(sound: Sound) -> None:
    story = adapted(sound).file(0, shapes={"outlet.lora_A.weight": (8,)})
    assert story.findings("names") == [
        "file 'model.safetensors': 'outlet.lora_A.weight' has shape (8,); (4, 2) in the unwrapped model"
    ]
