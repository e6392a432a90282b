"""Configuration files for ``accelerate launch``, and DeepSpeed's JSON files beside them.

``launch`` (module ``launching``) calls ``find_configuration`` when the launcher is ``accelerate``
or an argument of the script has ``{configuration}``. It returns the path of the user's file, or
writes a new one for the *cell*: the strategy, precision, number of ranks and options that should
run. For the cell ``fsdp2-fp32-w2`` that is ``fsdp2-fp32.yaml`` with ``distributed_type: FSDP``,
``num_processes: 2`` and the ``fsdp_config`` that the strategy has for accelerate. Users may also
call ``write_configuration``.

What is written comes from the strategies' own *backend configs*: how each library spells the
strategy (``strategies``). See
https://huggingface.co/docs/accelerate/package_reference/cli#accelerate-launch and
https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.failures import UsageProblem, hides_frames
from pytest_distcompat.parallel.mesh import parallelism
from pytest_distcompat.precisions import PRECISIONS, Precision
from pytest_distcompat.strategies import STRATEGIES, WrapSpec

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames

#: Other names of a strategy's file in accelerate's examples and in adopters' repositories.
FILE_ALIASES = {"ddp": ("multi_gpu", "ddp_config")}
#: Settings that a script's own arguments also control: the JSON sets them to "auto".
_LEFT_TO_THE_SCRIPT = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
#: torch's name of the dtype in which a mixed precision computes -> accelerate's name of it.
_MIXED = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
#: Keys of ``fsdp_config`` in transformers -> in accelerate's file; empty for keys that it lacks.
_RENAMED = {"cpu_offload": "offload_params", "transformer_layer_cls_to_wrap": ""}


def find_configuration(
    given: str | Path | None, cell: Cell, directory: Path, blocks: Sequence[str] = ()
) -> Path:
    """Return the file for ``accelerate launch``: the given one, or a new one.

    Args:
        given: A file; a directory with a file for the cell, such as ``fsdp2-fp32.yaml`` or
            ``fsdp2.yaml``; or None to write a new file.
        cell: The cell that should run.
        directory: Where to write a new file.
        blocks: As for ``write_configuration``.

    Raises:
        UsageProblem: A given directory has no file for the cell, or no file can describe the cell.
    """
    if given is None:
        return write_configuration(cell, directory, blocks)
    path = Path(given).resolve()
    if path.is_file():
        return path
    # The most specific name comes first.
    names = [
        f"{cell.strategy}-{cell.precision}",
        cell.strategy,
        *FILE_ALIASES.get(cell.strategy, ()),
    ]
    looked_for: list[str] = []
    for name, suffix in itertools.product(names, ("yaml", "yml", "json")):
        candidate = path / f"{name}.{suffix}"
        if candidate.is_file():
            return candidate
        looked_for.append(candidate.name)
    raise UsageProblem(
        f"{given}: no configuration for {cell.strategy}; looked for {', '.join(looked_for)}"
    )


def write_configuration(cell: Cell, directory: Path, blocks: Sequence[str] = ()) -> Path:
    """Write the cell's YAML file, and the DeepSpeed JSON file that it refers to.

    Args:
        cell: The cell.
        directory: Where to write the files; made if it is not there.
        blocks: Class names of the modules that FSDP wraps one by one; if empty, those that the
            model declares.

    Returns:
        The path of the YAML file.

    Raises:
        UsageProblem: No file can describe the cell.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{cell.strategy}-{cell.precision}.yaml"
    # JSON is YAML too: https://yaml.org/spec/1.2.2/#12-yaml-history
    text = json.dumps(_settings(cell, path, blocks), indent=2)
    path.write_text(f"{text}\n", encoding="utf-8")
    return path


def unsupported_reason(cell: Cell) -> str | None:
    """Return why no file can describe the cell, as one sentence; None if one can."""
    strategy = STRATEGIES.get(cell.strategy)
    precision = PRECISIONS.get(cell.precision)
    if precision.float8 and strategy.zero_stage is not None:
        return (
            "accelerate takes fp8 under DeepSpeed from Accelerator(mixed_precision='fp8') only, "
            "not from a file"
        )
    if cell.option("reduce_dtype") != "auto" and "fsdp" in cell.strategy:
        return (
            "accelerate's file has no word for FSDP's policy of dtypes: "
            "the script gives its plugin one"
        )
    if cell.option("dp_replicate") != 1 and cell.strategy == "fsdp1":
        return "accelerate's file has a parallelism_config for FSDP2 only"
    return strategy.unsupported_reason(cell)


def _settings(cell: Cell, path: Path, blocks: Sequence[str]) -> dict[str, Any]:
    """Return the content of the cell's file at ``path``: setting of accelerate -> value.

    For ZeRO the DeepSpeed JSON file, to which it refers, is written beside it.
    """
    problem = unsupported_reason(cell)
    if problem:
        raise UsageProblem(f"{cell.id}: {problem}")
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "mixed_precision": _mixed_precision(PRECISIONS.get(cell.precision)),
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": cell.world_size,
        "use_cpu": False,
    }
    settings |= _dynamo(cell)
    if PRECISIONS.get(cell.precision).float8:
        backend = "TE" if cell.option("fp8_backend") == "te" else "AO"
        settings["fp8_config"] = {"backend": backend}
    if STRATEGIES.get(cell.strategy).zero_stage is not None:
        # The JSON file sets the precision, and accelerate does not accept it twice.
        del settings["mixed_precision"]
        settings["distributed_type"] = "DEEPSPEED"
        file = _write_deepspeed_json(cell, path.with_suffix(".deepspeed.json"))
        settings["deepspeed_config"] = {
            "deepspeed_config_file": str(file),
            "zero3_init_flag": False,
        }
    elif "fsdp" in cell.strategy:
        settings["distributed_type"] = "FSDP"
        settings["fsdp_config"] = _fsdp(cell, blocks)
        sizes = parallelism(cell)
        if sizes:
            settings["parallelism_config"] = {
                f"parallelism_config_{name}": size for name, size in sizes.items()
            }
    return settings


def _mixed_precision(precision: Precision) -> str:
    """Return accelerate's name of the precision, such as ``bf16``.

    It is ``no`` without mixed precision: the model itself has the dtype in which it computes.
    """
    if precision.float8:
        return "fp8"
    if precision.mixed:
        return _MIXED[precision.compute]
    return "no"


def _dynamo(cell: Cell) -> dict[str, Any]:
    """Return the settings of torch.compile, by the cell's option ``compile``.

    The option is False (off), ``partial`` (the script itself compiles a part of the model), True
    (by inductor), ``regional`` (each block on its own), or the name of a backend. For the first two
    the file has no settings.
    """
    mode = cell.option("compile")
    if mode in {False, "partial"}:
        return {}
    backend = str(mode).upper()
    if mode is True:
        backend = "INDUCTOR"
    elif mode == "regional":
        # As in the built-in drivers: without inductor, which takes seconds for each graph.
        backend = "AOT_EAGER"
    return {
        "dynamo_config": {
            "dynamo_backend": backend,
            "dynamo_use_regional_compilation": mode == "regional",
        }
    }


def _write_deepspeed_json(cell: Cell, file: Path) -> Path:
    """Write DeepSpeed's JSON file of the cell, and return its path.

    It has ``auto`` for what the script's own arguments control, which accelerate then fills in.
    """
    strategy = STRATEGIES.get(cell.strategy)
    # Every ZeRO strategy has such a config.
    assert strategy.deepspeed is not None
    content = dict(strategy.deepspeed(PRECISIONS.get(cell.precision), cell))
    content |= dict.fromkeys(_LEFT_TO_THE_SCRIPT, "auto")
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return file


def _fsdp(cell: Cell, blocks: Sequence[str]) -> dict[str, Any]:
    """Return the ``fsdp_config`` of transformers' TrainingArguments with accelerate's keys.

    The strategy has its settings for transformers; accelerate's file has the same ones under other
    names. ``blocks`` are class names of modules that FSDP wraps one by one, in place of those that
    the model declares.
    """
    strategy = STRATEGIES.get(cell.strategy)
    assert strategy.transformers is not None
    # With replicas the strategy would import accelerate here, and ``parallelism_config`` describes
    # them.
    one_replica = cell.without("dp_replicate")
    arguments = strategy.transformers(PRECISIONS.get(cell.precision), one_replica, WrapSpec())
    settings: dict[str, Any] = {}
    for name, value in arguments["fsdp_config"].items():
        accelerate_name = _RENAMED.get(name, name)
        if accelerate_name:
            settings[f"fsdp_{accelerate_name}"] = value
    if cell.option("wrap_policy") != "size":
        settings["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        if blocks:
            settings["fsdp_transformer_layer_cls_to_wrap"] = ",".join(blocks)
    if cell.strategy == "fsdp1":
        # There it is the name of a sharding strategy: ``FULL_SHARD``.
        settings["fsdp_reshard_after_forward"] = str(settings["fsdp_reshard_after_forward"]).upper()
    return settings
