"""Scripts whose FSDP units and 8-bit layers are right or wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.scripts import ScriptRun, write_configuration
from pytest_distcompat.failures import Incompatible, UsageProblem

from .conftest import Launch

pytestmark = pytest.mark.spawn

CUT, ACCELERATE = "cut_loop.py", "accelerate_loop.py"
nightly = pytest.mark.nightly


def cut(run: Launch, wrap: str, *more: str, strategy: str = "fsdp2", **settings: Any) -> ScriptRun:
    script_run = run(CUT, "--strategy", strategy, "--wrap", wrap, *more, strategy=strategy, **settings)
    assert not script_run.failed, script_run.text()
    return script_run


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp1", pytest.param("fsdp2", marks=nightly)])
def test_blocks_that_the_model_declares(run: Launch, strategy: str) -> None:
    cut(run, "blocks", "--declares", strategy=strategy).check("active", "units")


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("fsdp1", marks=nightly)])
@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        ("whole", "the root"),
        pytest.param(
            "children",
            "'blocks.0.first', 'blocks.0.second', 'blocks.1.first', 'blocks.1.second', the root",
            marks=nightly,
        ),
        pytest.param("one", "'blocks.0', the root", marks=nightly),
    ],
)
def test_a_model_cut_elsewhere(run: Launch, strategy: str, wrap: str, message: str) -> None:
    """It ends well, it is sharded, and nobody else says a word."""
    script_run = cut(run, wrap, strategy=strategy, blocks=("Block",))
    script_run.check("active", "optimizer")
    expected = "expected 'blocks.0', 'blocks.1', the root, and none inside a block"
    with pytest.raises(Incompatible, match=re.escape(f"ranks 0, 1: FSDP's units are {message}; {expected}")):
        script_run.check("units")


@nightly
def test_a_root_that_nobody_wraps(run: Launch) -> None:
    with pytest.raises(Incompatible, match="the whole model that was seen is one block, a 'Block'"):
        cut(run, "not the root", blocks="Block").check("units")


@nightly
def test_a_class_that_the_model_has_not(run: Launch) -> None:
    with pytest.raises(Incompatible, match="the model's blocks are not known: no module of it is a 'Blok'"):
        cut(run, "blocks", "--declares", blocks="Blok").check("units")


@nightly
@pytest.mark.parametrize("recompute", [True, False])
def test_blocks_that_are_wrapped_one_after_another(run: Launch, recompute: bool) -> None:
    options = {"options": {"activation_checkpointing": True}} if recompute else {}
    script_run = cut(run, "by hand", *["--recompute"] * recompute, strategy="fsdp1", blocks="Block", **options)
    script_run.check("active", "units", "optimizer")


@nightly
def test_a_compiled_model(run: Launch) -> None:
    cut(run, "blocks", "--compile", blocks="Block", options={"compile": "aot_eager"}).check("active", "units")
    with pytest.raises(Incompatible, match="FSDP's units are '_orig_mod'"):
        cut(run, "blocks", "--compile", blocks="Block").check("units")


@nightly
@pytest.mark.parametrize("frozen", [True, False])
def test_a_unit_for_what_is_trained_of_a_frozen_block(run: Launch, frozen: bool) -> None:
    script_run = cut(run, "second", *["--frozen"] * frozen, strategy="fsdp1", blocks="Block")
    if frozen:
        script_run.check("active", "units")
    else:
        with pytest.raises(Incompatible, match=r"'blocks\.0\.second'"):
            script_run.check("units")


def configured(tmp_path: Path, strategy: str, **changes: str) -> Path:
    """The cell's file for accelerate, with other words for FSDP."""
    path = write_configuration(Cell(strategy, "fp32", 2), tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["fsdp_config"] |= {f"fsdp_{name}": value for name, value in changes.items()}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def accelerated(run: Launch, strategy: str, *more: str, **settings: Any) -> ScriptRun:
    script_run = run(ACCELERATE, "--steps", "3", *more, launcher="accelerate", strategy=strategy, **settings)
    assert not script_run.failed, script_run.text()
    return script_run


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("fsdp2", {"transformer_layer_cls_to_wrap": "LlamaMLP,LlamaAttention"}),
        pytest.param("fsdp1", {"transformer_layer_cls_to_wrap": "LlamaMLP,LlamaAttention"}, marks=nightly),
        pytest.param("fsdp1", {"auto_wrap_policy": "NO_WRAP"}, marks=nightly),
        pytest.param("fsdp2", {"auto_wrap_policy": "NO_WRAP"}, marks=nightly),
    ],
)
def test_a_configuration_that_names_other_classes(
    run: Launch, tmp_path: Path, strategy: str, words: dict[str, str]
) -> None:
    script_run = accelerated(run, strategy, configuration=configured(tmp_path, strategy, **words))
    script_run.check("active", "optimizer", "dtypes")
    with pytest.raises(
        Incompatible, match=r"FSDP's units are .*; expected 'model\.layers\.0', 'model\.layers\.1', the root"
    ):
        script_run.check("units")


@pytest.mark.nightly
def test_blocks_that_accelerates_file_names(run: Launch) -> None:
    """BERT declares its embeddings too; with those FSDP2 ends in a TypeError of DeviceMesh's."""
    accelerated(run, "fsdp2", "--bert", blocks=("BertLayer",)).check("active", "units", "names", "optimizer")


@nightly
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_an_adapter(run: Launch, strategy: str) -> None:
    pytest.importorskip("peft")
    accelerated(run, strategy, "--adapter").check("active", "units")


@pytest.mark.nightly
def test_layers_in_8_bits(run: Launch) -> None:
    pytest.importorskip("torchao")
    accelerated(run, "fsdp2", precision="fp8").check("active", "units", "float8", "optimizer", "dtypes")


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero2", marks=nightly)])
def test_no_layer_in_8_bits_is_a_finding(run: Launch, tmp_path: Path, strategy: str) -> None:
    """The file that the script is started by says bf16."""
    file = write_configuration(Cell(strategy, "bf16_upcast", 2), tmp_path)
    script_run = accelerated(run, strategy, precision="fp8", configuration=file)
    script_run.check("active", "optimizer", "dtypes")
    message = (
        "ranks 0, 1: 0 of 15 linear layers are in 8 bits after three steps; expected all but the first and the last"
    )
    with pytest.raises(Incompatible, match=message):
        script_run.check("float8")


@nightly
def test_layers_in_8_bits_that_are_not_trained(run: Launch) -> None:
    """As accelerate does it under DDP by its default recipe: the layers are converted, and the optimizer holds the old ones."""
    pytest.importorskip("torchao")
    script_run = accelerated(run, "ddp", precision="fp8")
    script_run.check("active", "float8")
    with pytest.raises(Incompatible, match=r"13 of 21 tensors in the optimizer are no parameters of the live model"):
        script_run.check("optimizer")


@nightly
def test_hybrid_shards(run: Launch) -> None:
    """Two copies of two shards, by the file that accelerate is given; a checkpoint, and the weights at the end."""
    saving = ("--save-at", "2", "--output", "{output}")
    settings = {"options": {"dp_replicate": 2, "state_dict": "full"}, "output": "{output}/final", "world_size": 4}
    script_run = accelerated(run, "fsdp2", *saving, **settings)
    script_run.check("active", "names", "optimizer", "dtypes", "memory", "final_model_loadable")


@nightly
def test_missing_replicas_of_hybrid_shards_are_a_finding(run: Launch) -> None:
    script_run = cut(run, "blocks", "--declares", options={"dp_replicate": 2}, world_size=4)
    with pytest.raises(Incompatible, match=r"shards are in 1 copies \(all ranks\); expected 2"):
        script_run.check("active")


@pytest.mark.parametrize(
    ("strategy", "ranks", "reason"),
    [("fsdp1", 4, "a parallelism_config for FSDP2 only"), ("fsdp2", 2, "need a multiple of 2 ranks, 4 or more")],
)
def test_hybrid_shards_that_no_file_can_express(tmp_path: Path, strategy: str, ranks: int, reason: str) -> None:
    with pytest.raises(UsageProblem, match=reason):
        write_configuration(Cell.of(strategy, "fp32", ranks, dp_replicate=2), tmp_path)
