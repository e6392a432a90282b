"""A strategy as files, and how a launcher is called."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.scripts import commands, write_configuration
from pytest_distcompat.ext.scripts.configuration import find_configuration
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES


def write_all(directory: Path, world_size: int = 2) -> tuple[list[Path], list[str]]:
    """Write every strategy in every precision; return the files, and the reasons why others cannot be written."""
    paths, reasons = [], []
    for strategy in STRATEGIES.names():
        for precision in PRECISIONS.names():
            try:
                paths.append(write_configuration(Cell(strategy, precision, world_size), directory))
            except UsageProblem as problem:
                reasons.append(str(problem))
    return paths, reasons


def test_every_strategy_in_every_precision(tmp_path: Path) -> None:
    """But fp8 under DeepSpeed, which no file can say."""
    paths, reasons = write_all(tmp_path)
    written = {path.stem for path in paths}
    assert len(paths) + len(reasons) == len(STRATEGIES.names()) * len(PRECISIONS.names())
    assert (
        "zero1-fp8-w2: accelerate takes fp8 under DeepSpeed from Accelerator(mixed_precision='fp8') only, not from a file"
        in reasons
    )
    zero = {name for name in STRATEGIES.names() if STRATEGIES.get(name).zero_stage is not None}
    pairs = itertools.product(STRATEGIES.names(), PRECISIONS.names())
    everything = {f"{strategy}-{precision}" for strategy, precision in pairs}
    assert written == everything - {f"{strategy}-fp8" for strategy in zero}
    for_deepspeed = {path.name.removesuffix(".deepspeed.json") for path in tmp_path.glob("*.json")}
    assert for_deepspeed == {name for name in written if name.startswith("zero")}


def settings(path: Path) -> dict[str, Any]:
    """The file as accelerate reads it."""
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def test_accelerate_reads_them_all(tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    for path in write_all(tmp_path, 4)[0]:
        read = config_args.load_config_from_file(str(path))
        assert read.num_processes == 4
        distributed_type = str(read.distributed_type)
        if path.stem.startswith("zero"):
            assert distributed_type.endswith("DEEPSPEED")
        elif path.stem.startswith("fsdp"):
            assert distributed_type.endswith("FSDP")
        else:
            assert distributed_type.endswith("MULTI_GPU")


def test_the_content_of_the_files(tmp_path: Path) -> None:
    fsdp = write_configuration(Cell.of("fsdp2", "bf16_upcast", 2, state_dict="full"), tmp_path)
    content = settings(fsdp)
    assert content["mixed_precision"] == "bf16"
    assert content["fsdp_config"]["fsdp_version"] == 2
    assert content["fsdp_config"]["fsdp_state_dict_type"] == "FULL_STATE_DICT"
    zero = write_configuration(Cell("zero3", "bf16_upcast"), tmp_path)
    written = json.loads(zero.with_suffix(".deepspeed.json").read_text(encoding="utf-8"))
    assert (written["zero_optimization"]["stage"], written["bf16"]["enabled"]) == (3, True)
    assert written["train_micro_batch_size_per_gpu"] == "auto"


def test_cells_that_no_file_can_express(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="zero2-fp8-w2: accelerate takes fp8 under DeepSpeed"):
        write_configuration(Cell("zero2", "fp8"), tmp_path)


@pytest.mark.parametrize("name", ["fsdp2-fp32.yaml", "fsdp2.yml", "fsdp2.json"])
def test_a_directory_of_the_users_own_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert find_configuration(tmp_path, Cell("fsdp2", "fp32"), tmp_path) == tmp_path / name


def test_a_directory_without_the_strategy(tmp_path: Path) -> None:
    (tmp_path / "multi_gpu.yaml").touch()
    assert find_configuration(tmp_path, Cell("ddp", "fp32"), tmp_path).name == "multi_gpu.yaml"
    with pytest.raises(UsageProblem, match=r"no configuration for fsdp1; looked for fsdp1-fp32.yaml, .*fsdp1.yaml"):
        find_configuration(tmp_path, Cell("fsdp1", "fp32"), tmp_path)


def test_commands(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    settings = {"world_size": 4, "directory": tmp_path}
    by_torchrun = commands.command_line(str(script), ["--x"], "torchrun", configuration=None, **settings)  # type: ignore[arg-type]
    assert by_torchrun[0][-4:] == ("--nproc-per-node", "4", str(script), "--x")
    by_accelerate = commands.command_line("-m", ["trl", "sft"], "accelerate", configuration=tmp_path, **settings)  # type: ignore[arg-type]
    assert by_accelerate[0][-5:] == ("--config_file", str(tmp_path), "-m", "trl", "sft")
    by_itself = commands.command_line(sys.executable, ["train"], "cli", configuration=None, **settings)  # type: ignore[arg-type]
    assert by_itself[0] == (sys.executable, "train")
    assert by_itself[1]["PET_NPROC_PER_NODE"] == "4"
    with pytest.raises(UsageProblem, match="no command 'no-such-trainer'"):
        commands.command_line("no-such-trainer", [], "cli", configuration=None, **settings)  # type: ignore[arg-type]


def test_a_launcher_is_no_rank_of_another_group() -> None:
    theirs = {"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x", "PET_NNODES": "2", "HOME": "/root"}
    assert commands.without_rank(theirs) == {"HOME": "/root"}


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_reduce_dtype_of_fsdp_cannot_be_written(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="accelerate's file has no word for FSDP's policy of dtypes"):
        write_configuration(Cell.of(strategy, "bf16_upcast", reduce_dtype="fp32"), tmp_path)


def test_reduce_dtype_of_zero_is_written(tmp_path: Path) -> None:
    write_configuration(Cell.of("zero2", "bf16_upcast", reduce_dtype="fp32"), tmp_path)
    (written,) = tmp_path.glob("*.json")
    assert json.loads(written.read_text(encoding="utf-8"))["communication_data_type"] == "fp32"


def test_the_process_that_writes_a_file_imports_no_trainer(tmp_path: Path) -> None:
    """pytest's own: hybrid shards are an object of accelerate's to Trainer, and two numbers in a file."""
    code = (
        "import sys, pathlib; from pytest_distcompat.cell import Cell\n"
        "from pytest_distcompat.ext.scripts import write_configuration\n"
        f"path = write_configuration(Cell.of('fsdp2', 'fp32', 4, dp_replicate=2), pathlib.Path({str(tmp_path)!r}))\n"
        "assert '\"parallelism_config_dp_replicate_size\": 2' in path.read_text()\n"
        "print(sorted({'torch', 'accelerate', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_blocks_that_are_named(tmp_path: Path, strategy: str) -> None:
    """A model may declare blocks that cannot be wrapped one by one: BERT's embeddings are tied to its head."""
    cell = Cell(strategy, "fp32", 2)
    named = write_configuration(cell, tmp_path, ("BertLayer", "BertPooler"))
    assert settings(named)["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "BertLayer,BertPooler"
    declared = write_configuration(cell, tmp_path)
    assert "cls_to_wrap" not in declared.read_text(encoding="utf-8")
    assert settings(named)["fsdp_config"]["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert settings(declared)["fsdp_config"]["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
