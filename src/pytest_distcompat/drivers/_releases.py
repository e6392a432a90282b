"""Which release of a library can say what, and how older ones say it: what a cell needs, and FSDP for TrainingArguments.

Nothing is imported to find out: a session asks for each of its cells.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.version import Version

from pytest_distcompat.installed import fits, version_of
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.precisions._base import installed
from pytest_distcompat.strategies import STRATEGIES

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell

#: From here on ``fsdp`` of TrainingArguments is a truth value and all else stands in ``fsdp_config``; before, it is words.
FSDP_BY_CONFIG = Version("5.10")
#: From here on ``fsdp_config`` says the version too; before, the environment of ``accelerate launch`` does.
FSDP_VERSION_BY_CONFIG = Version("5.0")


def needed(cell: Cell, libraries: Collection[str]) -> Iterator[str]:
    """The releases from which on these libraries can say the cell, as requirements (PEP 508)."""
    if "accelerate" in libraries:
        yield from _of_accelerate(cell)
    if "transformers" in libraries:
        # https://github.com/huggingface/transformers/pull/37147: Trainer before it prepares the model without its optimizer.
        if cell.strategy == "fsdp2":
            yield "transformers>=4.51"
        if cell.option("dp_replicate") != 1:
            yield "transformers>=4.56"
    precision = PRECISIONS.get(cell.precision)
    if STRATEGIES.get(cell.strategy).zero_stage and precision.master == "bfloat16":
        # Before, bf16_master_weights_and_grads is a key that is not known, or not read.
        yield "deepspeed>=0.18.3"
    if cell.strategy == "zero0" and precision.compute == "bfloat16":
        # Before, bf16 means BF16_Optimizer, which shards masters and states at stage 0 too.
        yield "deepspeed>=0.17.6"


def _of_accelerate(cell: Cell) -> Iterator[str]:
    if cell.option("dp_replicate") != 1:
        # ParallelismConfig: https://huggingface.co/docs/accelerate/concept_guides/nd_parallelism.
        yield "accelerate>=1.10"
    if cell.option("compile") == "regional":
        yield "accelerate>=1.7"
    if cell.strategy == "fsdp2" and cell.option("state_dict") == "full":
        yield "accelerate>=1.7"


def missing(requirements: Iterable[str]) -> str:
    """Which of the modules or releases are not installed, as one sentence; empty if all are."""
    return next(filter(None, map(_missing, dict.fromkeys(requirements))), "")


def _missing(wanted: str) -> str:
    requirement = _parsed(wanted)
    # Of a module inside a package, the package.
    package = requirement.name.partition(".")[0]
    if not installed(package):
        return f"{package} is not installed"
    if not requirement.specifier:
        return ""
    there = release(package)
    return "" if fits(requirement, there) else f"{requirement} is needed to say this, {there} is installed"


@cache
def _parsed(wanted: str) -> Requirement:
    return Requirement(wanted)


#: The installed release of a package, read once: a matrix asks for each of its cells.
release = cache(version_of)


def fsdp_words(settings: Mapping[str, Any], release: Version) -> tuple[dict[str, Any], dict[str, str]]:
    """What TrainingArguments of that release of transformers take for FSDP where they take other words than today's, and the
    variables that ``accelerate launch`` sets for what they have no word for. Both are empty from 5.10 on.

    https://huggingface.co/docs/transformers/v4.57.1/en/main_classes/trainer#transformers.TrainingArguments.fsdp
    """
    if release >= FSDP_BY_CONFIG or not settings.get("fsdp"):
        return {}, {}
    config = dict(settings["fsdp_config"])
    reshard = config["reshard_after_forward"] in {True, "full_shard"}
    words = ["full_shard" if reshard else "shard_grad_op", "auto_wrap"]
    if config.pop("cpu_offload"):
        words.append("offload")
    # Without it these releases take the weights of rank 0 alone for a contradiction.
    config["sync_module_states"] = config["cpu_ram_efficient_loading"]
    said = {"FSDP_STATE_DICT_TYPE": config["state_dict_type"]}
    if release < FSDP_VERSION_BY_CONFIG:
        said["FSDP_VERSION"] = str(config["version"])
        said["FSDP_RESHARD_AFTER_FORWARD"] = str(config.pop("reshard_after_forward")).lower()
    return {"fsdp": " ".join(words), "fsdp_config": config}, said
