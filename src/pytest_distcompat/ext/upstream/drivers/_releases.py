"""Releases that a cell requires, and TrainingArguments for FSDP in older releases.

At collection ``TinyDriver``, the base of the built-in drivers (classes by which trainers are
tested), asks for each cell (one configuration under test, as ``fsdp2-fp32-w2-optimizer_muon``):
``required`` yields requirements such as ``torch>=2.9``, and ``missing`` says in one sentence which
of them is not installed: then the cell is skipped. Installed releases are read from their metadata:
no library is imported.

On ranks ``TrainerDriver`` asks ``fsdp_for_release`` how to tell an older transformers about FSDP.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.version import Version

from pytest_distcompat.installed import fits, version_of
from pytest_distcompat.precisions import PRECISIONS, installed
from pytest_distcompat.strategies import STRATEGIES

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell

#: From here on ``fsdp`` of TrainingArguments is a bool and all else is in ``fsdp_config``; before,
#: it is a list of flags.
FSDP_BY_CONFIG = Version("5.10")
#: From here on ``fsdp_config`` has FSDP's version too; before, ``accelerate launch`` sets it in the
#: environment.
FSDP_VERSION_BY_CONFIG = Version("5.0")


def required(cell: Cell, libraries: Collection[str]) -> Iterator[str]:
    """Yield the releases of these libraries that the cell requires (PEP 508).

    Args:
        cell: The cell.
        libraries: The libraries of its driver: ``("accelerate", "torch", "deepspeed")``.
    """
    if "accelerate" in libraries:
        yield from _required_of_accelerate(cell)
    if "transformers" in libraries:
        yield from _required_of_transformers(cell)
    if cell.option("optimizer") == "muon":
        yield "torch>=2.9"
    if cell.option("optimizer") == "adam8bit":
        yield "torchao>=0.11"
    if cell.option("lora") == "int8":
        # Tried with torchao 0.18 and PEFT 0.21; sources of earlier ones than these lack the tensors
        # of ``Int8WeightOnlyConfig``.
        yield "torchao>=0.16"
        yield "peft>=0.19"
    precision = PRECISIONS.get(cell.precision)
    if STRATEGIES.get(cell.strategy).zero_stage and precision.master == "bfloat16":
        # Before, the key bf16_master_weights_and_grads is unknown or not read.
        yield "deepspeed>=0.18.3"
    if cell.strategy == "zero0" and precision.compute == "bfloat16":
        # Before, bf16 means BF16_Optimizer, which shards masters and states at stage 0 too.
        yield "deepspeed>=0.17.6"


def _required_of_accelerate(cell: Cell) -> Iterator[str]:
    """Yield the releases of accelerate that the cell requires."""
    if cell.option("dp_replicate") != 1:
        # ParallelismConfig: https://huggingface.co/docs/accelerate/concept_guides/nd_parallelism.
        yield "accelerate>=1.10"
    full_fsdp2 = cell.strategy == "fsdp2" and cell.option("state_dict") == "full"
    if cell.option("compile") == "regional" or full_fsdp2:
        yield "accelerate>=1.7"


def _required_of_transformers(cell: Cell) -> Iterator[str]:
    """Yield the releases of transformers that the cell requires."""
    # Before, Trainer prepares the model without its optimizer:
    # https://github.com/huggingface/transformers/pull/37147
    if cell.strategy == "fsdp2":
        yield "transformers>=4.51"
    if cell.option("dp_replicate") != 1:
        yield "transformers>=4.56"
    if cell.tp * cell.ep > 1:
        # ``DistributedConfig`` has changed in each of the releases before.
        yield "transformers>=5.23"
    if cell.option("optimizer") == "sgd":
        # Before, ``optim_args`` are not read for SGD, which has no momentum then: 5.0 has not, 5.10
        # has.
        yield "transformers>=5.10"


def missing(requirements: Iterable[str]) -> str | None:
    """Return a sentence about the first requirement that is not installed; None if all are."""
    for requirement in dict.fromkeys(requirements):
        reason = _missing(requirement)
        if reason:
            return reason
    return None


def _missing(requirement_text: str) -> str | None:
    """Return a sentence about the requirement if it is not installed; None if it is.

    Args:
        requirement_text: ``deepspeed>=0.18.3``, or a module: ``torchao``.
    """
    requirement = _parsed(requirement_text)
    # A requirement may name a module; what is installed is its package.
    package = requirement.name.partition(".")[0]
    if not installed(package):
        return f"{package} is not installed"
    if not requirement.specifier:
        return None
    version = release(package)
    if fits(requirement, version):
        return None
    return f"{requirement} is needed for this cell, {version} is installed"


#: A requirement, read once for all cells of a matrix.
_parsed = cache(Requirement)
#: The installed release of a package, read once for all cells of a matrix.
release = cache(version_of)


def fsdp_for_release(
    settings: Mapping[str, Any], release: Version
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return how a release of transformers is told about FSDP: arguments and variables.

    Both are empty for the newest release, and for a cell without FSDP. For 4.57, for example:
    ``{"fsdp": "full_shard auto_wrap", "fsdp_config": {...}}`` and
    ``{"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_VERSION": "2", ...}``.

    The arguments override those in ``settings``. The environment variables are those of
    ``accelerate launch``: https://huggingface.co/docs/transformers/v4.57.1/en/main_classes/trainer

    Args:
        settings: TrainingArguments for the newest release.
        release: The release.
    """
    if release >= FSDP_BY_CONFIG or not settings.get("fsdp"):
        return {}, {}
    config = dict(settings["fsdp_config"])
    reshard = config["reshard_after_forward"] in {True, "full_shard"}
    sharding = "full_shard" if reshard else "shard_grad_op"
    flags = [sharding, "auto_wrap"]
    if config.pop("cpu_offload"):
        flags.append("offload")
    # These releases raise if only rank 0 loads the weights and module states are not synchronised.
    config["sync_module_states"] = config["cpu_ram_efficient_loading"]
    variables = {"FSDP_STATE_DICT_TYPE": config["state_dict_type"]}
    if release < FSDP_VERSION_BY_CONFIG:
        variables["FSDP_VERSION"] = str(config["version"])
        variables["FSDP_RESHARD_AFTER_FORWARD"] = str(config.pop("reshard_after_forward")).lower()
    return {"fsdp": " ".join(flags), "fsdp_config": config}, variables
