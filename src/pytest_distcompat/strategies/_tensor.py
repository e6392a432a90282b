"""Tensor and sequence parallelism by torch's ``parallelize_module``, from the plan of a tiny model.

https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.models import model_of
from pytest_distcompat.models.llama import LLAMAS
from pytest_distcompat.strategies import _expert

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from pytest_distcompat.cell import Cell

#: Styles of sequence parallelism alone: what cuts the sequence, works on a part of it, and needs all of it (by that keyword).
SEQUENCE_STYLES = ("sequence", "norm", "gather")

#: Options that were tried beside DeepSpeed's AutoTP.
BESIDE_AUTOTP = frozenset({"model", "tp", "activation_checkpointing", "grad_accum", "param_groups", "frozen", "set"})


def unsupported_reason(cell: Cell, plan: Mapping[str, str]) -> str | None:
    """Return why a model of that plan cannot be cut as the cell asks; None if it can."""
    if not plan:
        return f"the model {cell.option('model')} has no plan for tensor parallelism"
    if cell.strategy != "fsdp2" and (problem := _no_autotp(cell)):
        return problem
    if cell.option("model") in LLAMAS and cell.tp > 2:
        return "the tiny llama has two heads of keys and values, which no more ranks can share"
    if cell.option("sp") and "norm" not in plan.values():
        return f"the model {cell.option('model')} has no sequence to cut"
    return "a plan names the model's layers, and an adapter puts others in their place" if cell.option("lora") else None


def _no_autotp(cell: Cell) -> str | None:
    """Return why DeepSpeed's own tensor parallelism (AutoTP) is not tried in the cell; None if it is."""
    if cell.cp > 1:
        return "DeepSpeed's AutoTP makes groups of its own, and its Ulysses brings others"
    if cell.strategy == "zero3":
        return "DeepSpeed's documentation of its own tensor parallelism (AutoTP) promises ZeRO-0, 1 and 2 alone"
    if cell.option("sp"):
        return "DeepSpeed's own tensor parallelism (AutoTP) cuts no sequence"
    if cell.option("model") == "llama_tied":
        return "AutoTP cuts the logits of tied embeddings, so that no rank has whole ones to compare"
    if cell.precision not in {"fp32", "bf16_upcast"}:
        return f"AutoTP is not driven in {cell.precision} yet"
    others = [name for name, _ in cell.options if name not in BESIDE_AUTOTP]
    return f"AutoTP is not driven with option {others[0]!r} yet" if others else None


def autotp_plan(cell: Cell) -> dict[str, Any]:
    """Return DeepSpeed's setting for a model whose plan transformers does not have; a layer of another style stays whole."""
    if cell.option("model") in LLAMAS:
        return {}
    kinds = {"colwise": "column", "colwise_gather": "column", "rowwise": "row"}
    specs = [
        {
            "patterns": [name.replace(".", r"\.").replace("*", r"\d+") + r"\.weight$"],
            "partition_type": kinds.get(style, "skip"),
            "gather_output": style == "colwise_gather",
        }
        for name, style in model_of(cell).tp_plan.items()
    ]
    return {"partition_config": {"use_default_specs": False, "layer_specs": specs}}


def parallelize(model: Module, mesh: DeviceMesh, plan: Mapping[str, str], experts: str = "", *, sequence: bool) -> None:
    """Cut the model's layers along a mesh of one dimension, in place; those of other stages of a pipeline are not here.

    ``experts`` is the name of the module whose experts are cut too; empty if there is none.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    from pytest_distcompat.models._modules import Elsewhere

    elsewhere = {name for name, module in model.named_modules() if isinstance(module, Elsewhere)}
    styles = {name: _style(style, sequence=sequence) for name, style in plan.items() if name not in elsewhere}
    parallelize_module(model, mesh, {name: style for name, style in styles.items() if style is not None})
    if experts:
        _expert.spread(model.get_submodule(experts), mesh)


def _style(name: str, *, sequence: bool) -> Any:
    """Return torch's style, None for one that needs sequence parallelism where there is none.

    A name says how a linear layer or an embedding is cut; ``_gather`` and ``_split`` leave the activations whole.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    whole, part = Replicate(), Shard(1)
    between = part if sequence else whole
    name, _, keyword = name.partition(":")
    if name in SEQUENCE_STYLES and not sequence:
        return None
    # Everything between layers is a plain tensor, which the model's own code can add up.
    prepare = functools.partial(PrepareModuleInput, use_local_output=True)
    if name == "gather" and keyword:
        return prepare(input_kwarg_layouts={keyword: part}, desired_input_kwarg_layouts={keyword: whole})
    styles: dict[str, Any] = {
        "colwise": ColwiseParallel,
        "colwise_gather": lambda: ColwiseParallel(input_layouts=between, output_layouts=whole),
        "rowwise": lambda: RowwiseParallel(output_layouts=between),
        "rowwise_split": lambda: RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "sequence": lambda: prepare(input_layouts=(whole,), desired_input_layouts=(part,)),
        "norm": lambda: SequenceParallel(use_local_output=True),
        "gather": lambda: prepare(input_layouts=(part,), desired_input_layouts=(whole,)),
    }
    return styles[name]()
