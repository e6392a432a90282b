"""A strategy as the files that ``accelerate launch`` and DeepSpeed take: made from the strategies' own backend configs.

https://huggingface.co/docs/accelerate/package_reference/cli#accelerate-launch, https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.strategies._fsdp import parallelism

#: How accelerate's own examples and adopters call a strategy, where it is not by our name.
ALSO = {"ddp": ("multi_gpu", "ddp_config")}
#: What a script says too, by its own arguments: the JSON leaves it to them.
_LEFT_TO_THE_SCRIPT = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_MIXED = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
#: Words of ``fsdp_config`` in transformers that are others in accelerate's file.
_RENAMED = {"cpu_offload": "offload_params", "transformer_layer_cls_to_wrap": ""}


def find_configuration(given: str | Path | None, cell: Cell, directory: Path, blocks: Sequence[str] = ()) -> Path:
    """The file for ``accelerate launch``: the one that is given, the cell's of a directory that is given, or a new one.

    In a directory it is called as the cell's strategy, with or without its precision: ``fsdp2-bf16_mixed.yaml``, ``fsdp2.yaml``.
    Raises UsageProblem if there is none.
    """
    if given is None:
        return write_configuration(cell, directory, blocks)
    path = Path(given).resolve()
    if path.is_file():
        return path
    names = [f"{cell.strategy}-{cell.precision}", cell.strategy, *ALSO.get(cell.strategy, ())]
    tried = [path / f"{name}.{suffix}" for name in names for suffix in ("yaml", "yml", "json")]
    found = next((one for one in tried if one.is_file()), None)
    if found is None:
        raise UsageProblem(
            f"{given}: no configuration for {cell.strategy}; looked for {', '.join(one.name for one in tried)}"
        )
    return found


def write_configuration(cell: Cell, directory: Path, blocks: Sequence[str] = ()) -> Path:
    """Write the cell's YAML, and the DeepSpeed JSON that it names, if it names one; the YAML's path.

    ``blocks`` are class names of the modules that FSDP wraps one by one; if none, those that the model declares.
    It says the same for GPUs and for the CPU: that accelerate runs it there is the business of the bridge.
    Raises UsageProblem for what accelerate cannot be told by a file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{cell.strategy}-{cell.precision}.yaml"
    path.write_text("\n".join(_yaml(_settings(cell, path, blocks))) + "\n", encoding="utf-8")
    return path


def unwritten(cell: Cell) -> str | None:
    """Why no file can say the cell, as one sentence; None if one can."""
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
    problem = unwritten(cell)
    if problem:
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
    if (how := cell.option("compile")) not in {False, "partial"}:
        backend = {True: "INDUCTOR", "regional": "AOT_EAGER"}.get(how, str(how).upper())
        settings["dynamo_config"] = {"dynamo_backend": backend, "dynamo_use_regional_compilation": how == "regional"}
    if precision.float8:
        settings["fp8_config"] = {"backend": "TE" if cell.option("fp8_backend") == "te" else "AO"}
    if strategy.zero_stage is not None:
        written = _deepspeed(cell)
        file = path.with_suffix(".deepspeed.json")
        file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        # The JSON says it, and accelerate takes no second word on that.
        del settings["mixed_precision"]
        settings["distributed_type"] = "DEEPSPEED"
        settings["deepspeed_config"] = {"deepspeed_config_file": str(file), "zero3_init_flag": False}
    elif "fsdp" in cell.strategy:
        settings["distributed_type"] = "FSDP"
        settings["fsdp_config"] = _fsdp(cell, blocks)
        if sizes := parallelism(cell):
            settings["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    return settings


def _deepspeed(cell: Cell) -> dict[str, Any]:
    strategy, precision = STRATEGIES.get(cell.strategy), PRECISIONS.get(cell.precision)
    assert strategy.deepspeed is not None
    return dict(strategy.deepspeed(precision, cell)) | dict.fromkeys(_LEFT_TO_THE_SCRIPT, "auto")


def _fsdp(cell: Cell, blocks: Sequence[str]) -> dict[str, Any]:
    """As TrainingArguments are told, but for the blocks: a model of transformers names its own, if nobody else does."""
    strategy = STRATEGIES.get(cell.strategy)
    assert strategy.transformers is not None
    # Of copies this process would have to import accelerate to speak, and they stand beside it.
    alone = cell.without("dp_replicate")
    told: Mapping[str, Any] = strategy.transformers(PRECISIONS.get(cell.precision), alone)["fsdp_config"]
    renamed = ((_RENAMED.get(name, name), value) for name, value in told.items())
    found = {f"fsdp_{name}": value for name, value in renamed if name}
    if blocks and cell.option("wrap_policy") != "size":
        found["fsdp_transformer_layer_cls_to_wrap"] = ",".join(blocks)
    if cell.strategy == "fsdp1":
        found["fsdp_reshard_after_forward"] = str(found["fsdp_reshard_after_forward"]).upper()
    return found


def _yaml(settings: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """YAML of names, numbers and truth values, one level deep in one another: all that these files have."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _yaml(value, f"{indent}  ")
        else:
            yield f"{indent}{name}: {json.dumps(value)}"
