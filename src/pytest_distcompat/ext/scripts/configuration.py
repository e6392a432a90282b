"""Configuration files for ``accelerate launch`` and DeepSpeed, made from the backend configs of the strategies.

https://huggingface.co/docs/accelerate/package_reference/cli#accelerate-launch, https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.failures import UsageProblem, hides_frames
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES, WrapSpec
from pytest_distcompat.strategies._fsdp import parallelism

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames

#: Other names of a strategy's file in accelerate's examples and in adopters' repositories.
FILE_ALIASES = {"ddp": ("multi_gpu", "ddp_config")}
#: Settings that a script's own arguments also control: the JSON sets them to "auto".
_LEFT_TO_THE_SCRIPT = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_MIXED = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
#: Keys of ``fsdp_config`` in transformers -> in accelerate's file; empty for keys that it lacks.
_RENAMED = {"cpu_offload": "offload_params", "transformer_layer_cls_to_wrap": ""}


def find_configuration(given: str | Path | None, cell: Cell, directory: Path, blocks: Sequence[str] = ()) -> Path:
    """Return the file for ``accelerate launch``: the given one, the cell's in a given directory, or a new one.

    Raises UsageProblem if a given directory has no file for the cell, or no file can describe the cell.
    """
    if given is None:
        return write_configuration(cell, directory, blocks)
    path = Path(given).resolve()
    if path.is_file():
        return path
    names = [f"{cell.strategy}-{cell.precision}", cell.strategy, *FILE_ALIASES.get(cell.strategy, ())]
    candidates = [path / f"{name}.{suffix}" for name in names for suffix in ("yaml", "yml", "json")]
    if file := next((candidate for candidate in candidates if candidate.is_file()), None):
        return file
    looked_for = ", ".join(candidate.name for candidate in candidates)
    raise UsageProblem(f"{given}: no configuration for {cell.strategy}; looked for {looked_for}")


def write_configuration(cell: Cell, directory: Path, blocks: Sequence[str] = ()) -> Path:
    """Write the cell's YAML file, and the DeepSpeed JSON file that it refers to; return the path of the YAML file.

    ``blocks`` are class names of the modules that FSDP wraps one by one; if empty, those that the model declares.
    Raises UsageProblem if no file can describe the cell.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{cell.strategy}-{cell.precision}.yaml"
    # JSON is YAML too: https://yaml.org/spec/1.2.2/#12-yaml-history
    path.write_text(json.dumps(_settings(cell, path, blocks), indent=2) + "\n", encoding="utf-8")
    return path


def unsupported_reason(cell: Cell) -> str | None:
    """Return why no file can describe the cell, as one sentence; None if one can."""
    strategy, precision = STRATEGIES.get(cell.strategy), PRECISIONS.get(cell.precision)
    if precision.float8 and strategy.zero_stage is not None:
        return "accelerate takes fp8 under DeepSpeed from Accelerator(mixed_precision='fp8') only, not from a file"
    if cell.option("reduce_dtype") != "auto" and "fsdp" in cell.strategy:
        return "accelerate's file has no word for FSDP's policy of dtypes: the script gives its plugin one"
    if cell.option("dp_replicate") != 1 and cell.strategy == "fsdp1":
        return "accelerate's file has a parallelism_config for FSDP2 only"
    return strategy.unsupported_reason(cell)


def _settings(cell: Cell, path: Path, blocks: Sequence[str]) -> dict[str, Any]:
    strategy, precision = STRATEGIES.get(cell.strategy), PRECISIONS.get(cell.precision)
    if problem := unsupported_reason(cell):
        raise UsageProblem(f"{cell.id}: {problem}")
    mixed = "fp8" if precision.float8 else _MIXED[precision.compute] if precision.mixed else "no"
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "mixed_precision": mixed,
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": cell.world_size,
        "use_cpu": False,
    }
    if (mode := cell.option("compile")) not in {False, "partial"}:
        backend = {True: "INDUCTOR", "regional": "AOT_EAGER"}.get(mode, str(mode).upper())
        settings["dynamo_config"] = {"dynamo_backend": backend, "dynamo_use_regional_compilation": mode == "regional"}
    if precision.float8:
        settings["fp8_config"] = {"backend": "TE" if cell.option("fp8_backend") == "te" else "AO"}
    if strategy.zero_stage is not None:
        file = path.with_suffix(".deepspeed.json")
        assert strategy.deepspeed is not None
        content = dict(strategy.deepspeed(precision, cell)) | dict.fromkeys(_LEFT_TO_THE_SCRIPT, "auto")
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        # The JSON file sets the precision, and accelerate does not accept it twice.
        del settings["mixed_precision"]
        settings["distributed_type"] = "DEEPSPEED"
        settings["deepspeed_config"] = {"deepspeed_config_file": str(file), "zero3_init_flag": False}
    elif "fsdp" in cell.strategy:
        settings["distributed_type"] = "FSDP"
        settings["fsdp_config"] = _fsdp(cell, blocks)
        if sizes := parallelism(cell):
            settings["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    return settings


def _fsdp(cell: Cell, blocks: Sequence[str]) -> dict[str, Any]:
    """Return the ``fsdp_config`` of TrainingArguments with accelerate's keys, and with ``blocks`` in place of a declaration."""
    strategy = STRATEGIES.get(cell.strategy)
    assert strategy.transformers is not None
    # With replicas the strategy would import accelerate here, and ``parallelism_config`` describes them.
    one_replica = cell.without("dp_replicate")
    arguments = strategy.transformers(PRECISIONS.get(cell.precision), one_replica, WrapSpec())
    renamed = ((_RENAMED.get(name, name), value) for name, value in arguments["fsdp_config"].items())
    settings = {f"fsdp_{name}": value for name, value in renamed if name}
    if cell.option("wrap_policy") != "size":
        settings["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        if blocks:
            settings["fsdp_transformer_layer_cls_to_wrap"] = ",".join(blocks)
    if cell.strategy == "fsdp1":
        settings["fsdp_reshard_after_forward"] = str(settings["fsdp_reshard_after_forward"]).upper()
    return settings
