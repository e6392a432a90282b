"""Tensor and sequence parallelism by torch's ``parallelize_module``, from the plan of a tiny model.

Drivers, by which trainers are tested, have it in cells (configurations under test) such as
``fsdp2-fp32-w4-tp_2-sp``. At collection ``unsupported_reason`` says which cells cannot run. On each
rank the strategy ``fsdp2``, or the driver for accelerate, calls ``parallelize(model, mesh, plan)``
before the model is wrapped. DeepSpeed splits layers itself (AutoTP): ``autotp_plan`` makes its
JSON of the same plan.

Tensor parallelism (``tp``) shards the weight of a layer: ``colwise`` by output, so that each rank
has some columns of the activations; ``rowwise`` by input, so that the ranks' outputs are summed.
Sequence parallelism (``sp``) shards the activations between such layers along the sequence, over
the same ranks.

https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html

A plan is a dictionary of a tiny model: name of a module -> style, such as
``{"model.layers.*.mlp.up_proj": "colwise"}``. The styles:
    colwise: Weight sharded by output; the activations stay sharded.
    colwise_gather: The same, and the output is gathered.
    colwise_dtensor: As ``colwise``, and the output is a DTensor.
    rowwise: Weight sharded by input; the input is sharded already, the output is summed.
    rowwise_split: The same, and the input is split first.
    sequence: Under ``sp`` the input of this module is split along the sequence.
    norm: Under ``sp`` this module works on a part of the sequence.
    gather: Under ``sp`` the input of this module is gathered along the sequence.
    gather:KEYWORD: The same for that keyword argument.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.models import LLAMAS, model_of
from pytest_distcompat.parallel import expert_parallel
from pytest_distcompat.parallel.reasons import first_reason, untried_option_reason

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from pytest_distcompat.cell import Cell

#: Styles that mean nothing without sequence parallelism.
SEQUENCE_STYLES = ("sequence", "norm", "gather")

#: Style -> DeepSpeed's name for how it shards a weight.
AUTOTP_PARTITIONS = {"colwise": "column", "colwise_gather": "column", "rowwise": "row"}
#: Names of the options that were tried beside DeepSpeed's AutoTP.
BESIDE_AUTOTP = frozenset(
    {"model", "tp", "activation_checkpointing", "grad_accum", "param_groups", "frozen", "set"}
)


def unsupported_reason(cell: Cell, plan: Mapping[str, str]) -> str | None:
    """Return why a model of that plan cannot be sharded as the cell asks; None if it can.

    Args:
        cell: The cell, with ``tp`` above 1.
        plan: The plan of its model; empty if the model has none.
    """
    if not plan:
        return f"the model {cell.option('model')} has no plan for tensor parallelism"
    if cell.strategy != "fsdp2":
        reason = _no_autotp(cell)
        if reason is not None:
            return reason
    return first_reason(
        (
            cell.option("model") in LLAMAS and cell.tp > 2,
            "the tiny llama has two heads of keys and values, which no more ranks can share",
        ),
        (
            bool(cell.option("sp")) and "norm" not in plan.values(),
            f"the plan of the model {cell.option('model')} has no layers for sequence parallelism",
        ),
        (
            bool(cell.option("sp")) and cell.option("model") == "llama_tied",
            "the plan leaves tied embeddings whole, and nothing gathers the sequence before them",
        ),
        (
            bool(cell.option("lora")),
            "a plan names the model's layers, and an adapter puts others in their place",
        ),
    )


def _no_autotp(cell: Cell) -> str | None:
    """Return why DeepSpeed's own tensor parallelism (AutoTP) is not tried in the cell.

    None if it is.
    """
    reason = first_reason(
        (
            cell.cp > 1,
            "DeepSpeed's AutoTP makes groups of its own, and its Ulysses brings others",
        ),
        (
            cell.strategy == "zero3",
            (
                "DeepSpeed's documentation of its own tensor parallelism (AutoTP) "
                "promises ZeRO-0, 1 and 2 alone"
            ),
        ),
        (
            bool(cell.option("sp")),
            "DeepSpeed's own tensor parallelism (AutoTP) shards no sequence",
        ),
        (
            cell.option("model") == "llama_tied",
            (
                "AutoTP shards the logits of tied embeddings, "
                "so that no rank has whole ones to compare"
            ),
        ),
        (
            cell.precision not in {"fp32", "bf16_upcast"},
            f"AutoTP is not driven in {cell.precision} yet",
        ),
    )
    if reason is not None:
        return reason
    return untried_option_reason("AutoTP", cell, BESIDE_AUTOTP)


def autotp_plan(cell: Cell) -> dict[str, Any]:
    """Return DeepSpeed's setting for a model whose plan transformers does not have.

    Names of modules become regular expressions, ``{"partition_config": {"layer_specs":
    [{"patterns": [...], "partition_type": "column", ...}], ...}}``. A layer of a style that AutoTP
    lacks stays whole. Empty for a Llama, whose plan DeepSpeed takes from transformers.
    """
    if cell.option("model") in LLAMAS:
        return {}
    layers = []
    for name, style in model_of(cell).tp_plan.items():
        module_pattern = name.replace(".", r"\.").replace("*", r"\d+")
        layer = {
            "patterns": [rf"{module_pattern}\.weight$"],
            "partition_type": AUTOTP_PARTITIONS.get(style, "skip"),
            "gather_output": style == "colwise_gather",
        }
        layers.append(layer)
    return {"partition_config": {"use_default_specs": False, "layer_specs": layers}}


def parallelize(
    model: Module, mesh: DeviceMesh, plan: Mapping[str, str], experts: str = "", *, sequence: bool
) -> None:
    """Shard the model's layers in place.

    Args:
        model: The model; layers of other stages of a pipeline are placeholders, and stay as they
            are.
        mesh: One dimension, the ranks of tensor parallelism.
        plan: Name of a module, with ``*`` for numbers -> its style.
        experts: Name of the module whose experts are sharded too; empty if there is none.
        sequence: Whether activations between layers are sharded along the sequence.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    from pytest_distcompat.parallel.placeholder import Elsewhere

    placeholders: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, Elsewhere):
            placeholders.add(name)
    styles = {}
    for name, style_name in plan.items():
        if name in placeholders:
            continue
        style = _style(style_name, sequence=sequence)
        if style is not None:
            styles[name] = style
    parallelize_module(model, mesh, styles)
    if experts:
        expert_parallel.spread(model.get_submodule(experts), mesh)


def _style(name: str, *, sequence: bool) -> Any:
    """Return torch's ``ParallelStyle`` for a style of a plan.

    None for a style of sequence parallelism where there is none.

    Args:
        name: The style: ``colwise``, ``gather:hidden_states``.
        sequence: Whether activations between layers are sharded along the sequence.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    name, _, keyword = name.partition(":")
    if name in SEQUENCE_STYLES and not sequence:
        return None
    full = Replicate()
    # Dimension 1 of activations: (rows, tokens, hidden size).
    part_of_sequence = Shard(1)
    between_layers: Any = full
    if sequence:
        between_layers = part_of_sequence
    # Everything between layers is a plain tensor, which the model's own code can add up.
    prepare_input = functools.partial(PrepareModuleInput, use_local_output=True)
    if name == "gather" and keyword:
        return prepare_input(
            input_kwarg_layouts={keyword: part_of_sequence},
            desired_input_kwarg_layouts={keyword: full},
        )
    # Style -> what makes torch's object. Layouts are how activations are placed on the ranks.
    makers: dict[str, Any] = {
        "colwise": ColwiseParallel,
        "colwise_gather": lambda: ColwiseParallel(
            input_layouts=between_layers, output_layouts=full
        ),
        "colwise_dtensor": lambda: ColwiseParallel(use_local_output=False),
        "rowwise": lambda: RowwiseParallel(output_layouts=between_layers),
        "rowwise_split": lambda: RowwiseParallel(input_layouts=full, output_layouts=full),
        "sequence": lambda: prepare_input(
            input_layouts=(full,), desired_input_layouts=(part_of_sequence,)
        ),
        "norm": lambda: SequenceParallel(use_local_output=True),
        "gather": lambda: prepare_input(
            input_layouts=(part_of_sequence,), desired_input_layouts=(full,)
        ),
    }
    return makers[name]()
