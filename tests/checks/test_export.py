"""Check ``export`` on hand-made traces: files that nobody else can load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.model_values import adapter_name
from pytest_distcompat.trace import FileInfo

if TYPE_CHECKING:
    from tests.checks.traces import Story

    from pytest_distcompat.trace import Snapshot

RunsOf = Callable[[str, str], "Story"]
CELLS = ("ddp-fp32-w2", "fsdp1-fp32-w2", "fsdp2-fp32-w4", "zero1-fp32-w2", "zero3-fp32-w2")
FILE = "export/model.safetensors"


@pytest.mark.parametrize("cell", CELLS)
def test_sound(runs_of: RunsOf, cell: str) -> None:
    assert runs_of(cell, "export").findings("export") == []


def with_file(story: Story, **changes: Any) -> Story:
    def change(snapshot: Snapshot) -> Snapshot:
        files = []
        for file in snapshot.files:
            if file.path == FILE:
                files.append(replace(file, **changes))
            else:
                files.append(file)
        return replace(snapshot, files=tuple(files))

    return story.alter(change, action="files", rank=0)


def with_another_file(story: Story, file: FileInfo) -> Story:
    """Return the story with a file beside those that were exported."""

    def change(snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, files=(*snapshot.files, file))

    return story.alter(change, action="files", rank=0)


@pytest.mark.parametrize(
    ("cell", "prefix", "hint"),
    [
        ("ddp-fp32-w2", "module.", "; expected 'outlet.weight'"),
        ("fsdp1-fp32-w2-compile", "_orig_mod.", "; expected 'outlet.weight'"),
        ("zero3-fp32-w2", "_checkpoint_wrapped_module.", ""),
    ],
)
def test_a_name_with_a_segment_too_many(runs_of: RunsOf, cell: str, prefix: str, hint: str) -> None:
    keys = ("inlet.weight", "frozen.weight", f"{prefix}outlet.weight", "scale")
    story = with_file(runs_of(cell, "export"), keys=keys)
    assert story.findings("export") == [
        f"file {FILE!r}: key '{prefix}outlet.weight' is none of the model's own{hint}",
        "1 of 5 names are in no exported file, first 'outlet.weight'",
    ]


def test_names_with_one_extra_prefix(runs_of: RunsOf) -> None:
    names = ("inlet.weight", "frozen.weight", "outlet.weight", "head.weight", "scale")
    keys = tuple(f"module.{name}" for name in names)
    story = with_file(runs_of("ddp-fp32-w2", "export"), keys=keys)
    first, _ = story.findings("export")
    others = "key 'module.frozen.weight' and 4 others are none of the model's own; expected 'frozen.weight'"
    assert first == f"file {FILE!r}: 5 keys have the extra prefix `module.`: {others}"


def written(story: Story, *names: str) -> Story:
    """Return the story of a model that its library writes by other names."""
    return story.unwrapped({"written_names": names}, action="build_model")


def test_names_that_the_library_writes(runs_of: RunsOf) -> None:
    """As transformers' experts, which are one tensor in memory and one each in files."""
    names = ("inlet.weight", "frozen.weight", "outlet.0.weight", "outlet.1.weight", "scale")
    story = written(runs_of("ddp-fp32-w2", "export"), *names)
    assert story.findings("export") == []
    changed = with_file(story, keys=names)
    assert changed.findings("export") == []
    changed = with_file(story, keys=(*names[:3], "scale"))
    assert changed.findings("export") == ["1 of 5 names are in no exported file, first 'outlet.1.weight'"]
    changed = with_file(story, keys=(*names, "outlet.2.weight"))
    (finding,) = changed.findings("export")
    assert "key 'outlet.2.weight' is none of the model's own" in finding


def with_adapter(story: Story, layer: str) -> Story:
    """Return the story of a model with an adapter on one frozen layer."""
    name = f"base_model.model.{layer}"

    def change(snapshot: Snapshot) -> Snapshot:
        if snapshot.unwrapped is None:
            return snapshot
        weight = snapshot.unwrapped.parameters[0]
        base = replace(weight, name=f"{name}.base_layer.weight", trainable=False)
        adapter = replace(weight, name=f"{name}.lora_A.default.weight", trainable=True)
        unwrapped = replace(snapshot.unwrapped, parameters=(base, adapter))
        return replace(snapshot, unwrapped=unwrapped)

    keys = (f"{name}.base_layer.weight", f"{name}.lora_A.weight")
    return with_file(story.alter(change, action="build_model"), keys=keys, shapes={})


def test_names_of_an_adapter_in_its_file() -> None:
    assert adapter_name("q_proj.lora_A.default.weight") == "q_proj.lora_A.weight"
    assert adapter_name("embed_tokens.lora_embedding_A.default") == "embed_tokens.lora_embedding_A"
    assert adapter_name("lm_head.modules_to_save.default.weight") == "lm_head.weight"


def test_peft_saves_the_weight_of_an_output_layer_beside_its_adapter(runs_of: RunsOf) -> None:
    story = with_adapter(runs_of("ddp-fp32-w2-lora", "export"), "lm_head")
    assert not any("none of the model's own" in finding for finding in story.findings("export"))


def test_a_frozen_weight_of_another_layer_is_in_an_adapters_file(runs_of: RunsOf) -> None:
    story = with_adapter(runs_of("ddp-fp32-w2-lora", "export"), "up_proj")
    expected = "key 'base_model.model.up_proj.base_layer.weight' is none of the model's own"
    assert any(expected in finding for finding in story.findings("export"))


def test_layers_share_a_vector_of_an_adapter_which_peft_saves_beside_its_projections(runs_of: RunsOf) -> None:
    own, shared, projection = "layer.vectors.default.0", "vectors.default.0", "layer.projection.default"

    def change(snapshot: Snapshot) -> Snapshot:
        if snapshot.unwrapped is None:
            return snapshot
        vector = replace(snapshot.unwrapped.parameters[0], name=own, trainable=True)
        unwrapped = replace(
            snapshot.unwrapped,
            parameters=(vector,),
            buffers=(),
            tied=((own, shared),),
            state_dict=(own, shared, projection),
        )
        return replace(snapshot, unwrapped=unwrapped)

    story = runs_of("ddp-fp32-w2-lora", "export").alter(change, action="build_model")
    saved = with_file(story, keys=("vectors.0", "layer.projection"), shapes={})
    texts = "\n".join(saved.findings("export"))
    assert "none of the model's own" not in texts
    assert "in no exported file" not in texts
    missing = with_file(story, keys=("layer.projection",), shapes={})
    assert any("1 of 1 names are in no exported file" in finding for finding in missing.findings("export"))


def test_one_of_tied_names_is_enough(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "export")
    for kept in ("inlet.weight", "head.weight"):
        keys = (kept, "frozen.weight", "outlet.weight", "scale")
        changed = with_file(story, keys=keys, shapes={})
        assert changed.findings("export") == []
    changed = with_file(story, keys=("frozen.weight", "outlet.weight"), shapes={})
    assert changed.findings("export") == [
        "3 of 5 names are in no exported file, first 'head.weight', 'inlet.weight', 'scale'"
    ]


def test_another_shape(runs_of: RunsOf) -> None:
    story = with_file(runs_of("fsdp2-fp32-w2", "export"), shapes={"outlet.weight": (1, 7)})
    assert story.findings("export") == [
        f"file {FILE!r}: 'outlet.weight' has shape (1, 7); (2, 7) in the unwrapped model"
    ]


def test_an_optimizer_in_it(runs_of: RunsOf) -> None:
    extra = FileInfo("export/optimizer.bin", "torch", "optimizer", ("inlet.weight",))
    story = with_another_file(runs_of("fsdp2-fp32-w2", "export"), extra)
    assert story.findings("export") == [
        "file 'export/optimizer.bin' holds 1 keys of an optimizer; expected the model alone"
    ]


def test_an_index_has_each_key_in_its_file(runs_of: RunsOf) -> None:
    story = runs_of("fsdp2-fp32-w2", "export")
    path = "export/model.safetensors.index.json"
    files = story.trace.run("train").at("files")[0].files
    (exported,) = [file for file in files if file.path == FILE]

    def findings_of(files: dict[str, str]) -> list[str]:
        index = FileInfo(path, "index", "index", tuple(files), files=files)
        return with_another_file(story, index).findings("export")

    _, _, name = FILE.rpartition("/")
    complete = dict.fromkeys(exported.keys, name)
    assert findings_of(complete) == []
    assert findings_of({**complete, "scale": "lost.safetensors"}) == [
        f"file {path!r}: it names 1 keys that are not in their files, first 'scale' in 'lost.safetensors'",
        f"file {path!r}: 1 keys beside it are not in it, first 'scale' in {name!r}",
    ]
    del complete["scale"]
    assert findings_of(complete) == [f"file {path!r}: 1 keys beside it are not in it, first 'scale' in {name!r}"]


def test_an_index_has_the_size_of_its_tensors_and_one_file_for_each(runs_of: RunsOf) -> None:
    shapes = {"inlet.weight": (2, 7), "frozen.weight": (3,), "outlet.weight": (2, 7), "scale": (2,)}
    sound = with_file(runs_of("ddp-fp32-w2", "export"), shapes={}, dtypes={})

    def findings_of(size: int | None, dtype: str = "bfloat16", second: tuple[str, ...] = ()) -> list[str]:
        files = dict.fromkeys(shapes, "a.safetensors")
        names = tuple(shapes)
        dtypes = dict.fromkeys(shapes, dtype)
        own = FileInfo("export/a.safetensors", "safetensors", "model", names, shapes, dtypes)
        other = FileInfo("export/b.safetensors", "safetensors", "model", second)
        path = "export/i.safetensors.index.json"
        index = FileInfo(path, "index", "index", names, files=files, total_size=size)
        changed = sound.snapshot("files", {"files": (own, other, index)}, rank=0)
        return [text for text in changed.findings("export") if "index" in text]

    assert findings_of(66) == []
    assert findings_of(None) == []
    assert findings_of(1, dtype="complex64") == []
    path = "file 'export/i.safetensors.index.json'"
    assert findings_of(132) == [f"{path}: total_size is 132; the tensors that it names have 66 bytes"]
    assert findings_of(66, second=("scale",)) == [
        f"{path}: 1 keys are in a second file too, first 'scale' in 'b.safetensors'"
    ]


def test_nothing_was_written(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "export").snapshot("files", {"files": ()}, rank=0)
    first, *_ = story.findings("export")
    assert first.startswith("5 of 5 names are in no exported file")


@pytest.mark.parametrize("cell", CELLS)
def test_a_parameter_is_not_the_trained_one(runs_of: RunsOf, cell: str) -> None:
    story = reloaded(runs_of(cell, "export"), parameters={"digest": "14:1"})
    assert story.findings("export") == ["parameter 'outlet.weight': other values after the reload"]


def test_ranks_hold_other_values_than_one_another_before_the_export(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "export")
    story = story.parameters({"digest": "14:1"}, only="outlet.weight", action="export", rank=1)
    assert story.findings("export") == [
        "parameter 'outlet.weight': unlike from rank to rank before, alike after the reload"
    ]


def reloaded(story: Story, **changes: dict[str, Any]) -> Story:
    """Return the story with other fields of ``outlet.weight`` or of the buffer in the reloaded model."""

    def change(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        parts: dict[str, Any] = {}
        for part, fields in changes.items():
            infos = []
            for info in getattr(snapshot.unwrapped, part):
                if info.name in {"outlet.weight", "scale"}:
                    infos.append(replace(info, **fields))
                else:
                    infos.append(info)
            parts[part] = tuple(infos)
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, **parts))

    return story.alter(change, run="reload", action="reload")


def test_a_buffer_is_not_the_trained_one(runs_of: RunsOf) -> None:
    story = reloaded(runs_of("fsdp2-fp32-w2", "export"), buffers={"digest": "4:1"})
    assert story.findings("export") == ["buffer 'scale': other values after the reload"]


def test_a_lower_dtype_is_compared_with_the_copies_in_that_dtype(runs_of: RunsOf) -> None:
    """Masters in float32, exported and reloaded in bfloat16: then the live bfloat16 copies are what was exported."""
    story = runs_of("zero1-fp32-w2", "export")
    rounded = story.parameters({"dtype": "bfloat16"}, action="export")
    rounded = rounded.parameters({"digest": "14:1"}, only="outlet.weight", action="export")
    assert rounded.findings("export") == []
    lower = reloaded(rounded, parameters={"dtype": "bfloat16", "digest": "14:1"})
    assert lower.findings("export") == []
    # Rounded, and shown as float32: what the masters knew is lost.
    lost = reloaded(rounded, parameters={"digest": "14:1"})
    assert lost.findings("export") == ["parameter 'outlet.weight': other values after the reload"]


def test_outputs(runs_of: RunsOf) -> None:
    story = runs_of("fsdp2-fp32-w2", "export")
    other = story.snapshot("evaluate", {"outputs": (0.25, -2.0, 1.6)}, rank=1)
    assert other.findings("export") == [
        "rank 1: outputs of the trained and of the reloaded model are up to 0.1 apart (4.0e-04 allowed, of 2)"
    ]
    changed = story.snapshot("evaluate", {"outputs": (0.25, -2.0, 1.5001)})
    assert changed.findings("export") == []
    changed = story.snapshot("evaluate", {"outputs": (0.25, -2.0, float("nan"))})
    assert len(changed.findings("export")) == 2
    changed = story.snapshot("evaluate", {"outputs": ()}, rank=1)
    assert changed.findings("export") == ["rank 1: 0 outputs of the trained model; 3 of the reloaded one"]
    infinite = story.snapshot("evaluate", {"outputs": (0.25, -2.0, float("inf"))}, run="reload")
    assert infinite.findings("export") == ["1 of 3 outputs of the reloaded model are infinite; expected finite numbers"]
    silent = story.snapshot("evaluate", {"outputs": ()}, run="reload")
    assert silent.findings("export") == ["the reloaded model computed nothing"]


def test_outputs_of_products_in_tf32(runs_of: RunsOf) -> None:
    story = runs_of("fsdp2-fp32-w2-model_mlp-compile_aot_eager", "export")
    since = story.alter(lambda snapshot: replace(snapshot, products={"matmul": "tf32"}))
    since = since.snapshot("build_model", {"products": {"matmul": "ieee"}})
    # As measured on an H100: 4.8e-4 of 1.13.
    close = {"outputs": (0.25, -2.0, 1.5008)}
    changed = story.snapshot("evaluate", close)
    assert changed.findings("export") != []
    changed = since.snapshot("evaluate", close)
    assert changed.findings("export") == []
    changed = since.snapshot("evaluate", {"outputs": (0.25, -2.0, 1.6)}, rank=1)
    (finding,) = changed.findings("export")
    assert finding.endswith("(1.0e-02 allowed, of 2); products of float32 are in TF32 since build")


def test_no_unwrapped_model(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "export").without("reload", run="reload")
    assert story.findings("export") == ["the unwrapped model was not recorded"]


def test_cells_to_which_it_does_not_apply() -> None:
    not_applicable = CHECKS.get("export").not_applicable
    assert not_applicable(Cell.parse("ddp-fp32-w2"), TorchDriver) is None
    assert not_applicable(Cell.parse("ddp-fp32-w2"), Driver) == "the driver has no export()"


def test_a_rank_with_statistics_of_its_own_may_compute_something_else(runs_of: RunsOf) -> None:
    """BatchNorm's buffers are filled by each rank from its own data; the file has those of one."""
    story = runs_of("ddp-fp32-w2", "export").buffers({"digest": "3:1"}, action="export", rank=1)
    changed = story.snapshot("evaluate", {"outputs": (9.0, 9.0, 9.0)}, rank=1)
    assert changed.findings("export") == []
    changed = story.snapshot("evaluate", {"outputs": (9.0, 9.0, 9.0)}, rank=0)
    assert changed.findings("export") == [
        "rank 0: outputs of the trained and of the reloaded model are up to 11 apart (4.0e-04 allowed, of 2)"
    ]
