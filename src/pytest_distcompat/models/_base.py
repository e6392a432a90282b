"""``TinyModel``: how to make a model for the built-in drivers, and its data.

``ext/upstream/models`` makes them: ``llama``, ``mlp``, ``hf:gpt2`` and others, which a cell (one
configuration under test) names in its option ``model``. ``TinyDriver``, the base class of the
built-in drivers, calls its functions on each rank: ``make()`` in ``build_model``, ``batch(step,
rank)`` and ``loss(model, batch)`` in each step. The same step and rank give the same batch in every
process, so that one process can train on the batches of all ranks as a reference. At collection
drivers read the fields that say which cells the model is for, checks which tolerances it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    Batch = dict[str, torch.Tensor]

#: Tokens at the start of a row that have no label. Uneven over ranks and steps: equal numbers would
#: hide a trainer that averages averages (https://github.com/huggingface/transformers/pull/34191).
PROMPT_LENGTHS = (0, 13, 6, 10, 3)


def prompt_length(step: int, rank: int) -> int:
    """Return how many tokens at the start of each row are not trained on.

    Args:
        step: The number of the step.
        rank: The rank whose batch for that step it is.
    """
    index = (step + 2 * rank) % len(PROMPT_LENGTHS)
    return PROMPT_LENGTHS[index]


@dataclass(frozen=True)
class Stages:
    """How a model is cut into the stages of a pipeline.

    ``parallel/pipeline_parallel.py`` says what a stage is.

    Attributes:
        parts: Names of modules in the order of the forward; those of one part stay together, and
            each stage gets equally many parts: ``(("embed", "blocks.0"), ("blocks.1", "head"))``.
        forward: ``forward(model, received, first=, last=)`` returns what a stage sends to the next
            one: hidden states of shape (rows, tokens, hidden size), or logits from the last stage.
        loss: ``loss(logits, labels)`` returns the loss of the last stage's logits.
        shapes: ``shapes(model, batch)`` returns tensors like the first stage's tokens, the hidden
            states between stages, and the last stage's logits.
    """

    parts: tuple[tuple[str, ...], ...]
    forward: Callable[..., torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    shapes: Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class LayerByLayer:
    """A model that is a run of layers, each fed with the output of the one before.

    ``parallel/deepspeed_pipeline.py`` makes DeepSpeed's ``PipelineModule`` of it.

    Attributes:
        make: Returns the layers of a model: modules of it, or DeepSpeed's ``TiedLayerSpec`` for one
            that is used in two places.
        count: How many layers there are.
        inputs: The entry of a batch that the first layer is fed with.
        loss: ``loss(outputs, labels)`` returns the loss of the last layer's outputs.
    """

    make: Callable[[Any], list[Any]]
    count: int
    inputs: str
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TinyModel:
    """A tiny model and its data.

    Attributes:
        name: The value of option ``model``.
        blocks: Class names of the modules that FSDP wraps one by one: ``("LlamaDecoderLayer",)``.
        make: Returns a float32 model on the CPU, from the current random state.
        batch: ``batch(step, rank)`` returns the same batch for the same numbers in every process.
        loss: ``loss(model, batch)`` returns the mean over what ``count(batch)`` counts.
        count: Counts the tokens, or samples, that the loss is the mean of.
        outputs: ``outputs(model, batch)`` returns what the model computes.
        reload: Returns the unwrapped model from a directory with the exported files.
        frozen_modules: Names of the modules that option ``frozen`` freezes.
        ignored_module: Name of the module, of frozen weights, that option ``ignored_modules``
            leaves out of the sharding.
        unit_size: How many parameters make a unit under option ``wrap_policy``.
        lora_targets: Names of the modules that option ``lora`` adapts; ``all-linear`` for all
            linear layers but the last.
        in_8_bits: Whether it has layers with sizes divisible by 16, as products in 8 bits need.
        largest: How many elements its largest matrix has. Only the model for optimizers with
            quantized state says it, because they quantize large tensors alone; 0 for others.
        spread: Factor on the loss tolerance of precisions below float32: rounding shows the more,
            the fewer samples are averaged.
        gpu_spread: Factor in place of ``spread`` for bfloat16 on a GPU, if it is larger: products
            are added up in another order.
        norm_spread: Factor on the tolerance of gradient norms, in every precision.
        gradient_rounding: How far rounding to bfloat16 may move the norm of a single parameter's
            gradient, relative to it; 0.0 if no farther than ``Precision.norm_tolerance``. It moves
            one the more, the more of the numbers cancel that it is the sum of.
        tp_plan: Name of a module, with ``*`` for numbers -> how tensor parallelism cuts it, see
            ``parallel/tensor_parallel.py``.
        experts: Name of the module with the experts, which option ``ep`` spreads over ranks. In a
            model for FSDP2 each row of its parameters, along dimension 0, belongs to one expert; in
            DeepSpeed's ``MoE`` each expert is a module. Empty without experts.
        driver: Name of the only driver that can train it, empty if all can.
        only_zero: Whether it is trained under ZeRO alone, because its forward calls functions of
            DeepSpeed that need DeepSpeed's engine.
        stages: How torch's pipelines cut it; None if they cannot.
        layers: Its layers for DeepSpeed's pipelines; None if it is no run of layers.
        random: Whether its forward draws random numbers. The reference, which is the same training
            in one process, cannot draw those of several ranks.
        only_float32: Whether it is numerically unstable: rounding decides what it computes.
        one_batch: Whether its forward computes over the rows of all ranks, so that the reference
            takes them as one batch.
        one_block: Whether it has a block only once. Then there are no equal blocks, as regional
            compilation needs.
        unused: Whether its forward may use a parameter on one rank and not on another. DDP gets
            ``find_unused_parameters`` then.
        extra_state: Whether its state dict has more than parameters and buffers.
        without_loss: Whether its class computes no loss. Then ``loss`` is how far the outputs are
            from fixed targets.
        not_on_cpu: Why it cannot train on CPU ranks; empty if it can.
        find_blocks: Returns what ``blocks`` should be, where that is known only once the model's
            class is imported; ``blocks`` is empty then.
        written_names: Returns the keys that its library's ``save_pretrained`` writes, where they
            are not the names of the state dict.
        unsupported_reason: Why the model cannot be made here; empty if it can.
        preload: Modules that it needs, such as ``transformers``. Ranks are forked from a process
            that has imported them.
        order: Where the model stands in lists.
    """

    name: str
    blocks: tuple[str, ...]
    make: Callable[[], Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Module, Batch], torch.Tensor]
    count: Callable[[Batch], int]
    outputs: Callable[[Module, Batch], torch.Tensor]
    reload: Callable[[Path], Module]
    frozen_modules: tuple[str, ...] = ()
    ignored_module: str = ""
    unit_size: int = 1000
    lora_targets: tuple[str, ...] = ()
    in_8_bits: bool = True
    largest: int = 0
    spread: float = 1.0
    gpu_spread: float = 1.0
    norm_spread: float = 1.0
    gradient_rounding: float = 0.0
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    experts: str = ""
    driver: str = ""
    only_zero: bool = False
    stages: Stages | None = None
    layers: LayerByLayer | None = None
    random: bool = False
    only_float32: bool = False
    one_batch: bool = False
    one_block: bool = False
    unused: bool = False
    extra_state: bool = False
    without_loss: bool = False
    not_on_cpu: str = ""
    find_blocks: Callable[[], tuple[str, ...]] | None = None
    written_names: Callable[[], tuple[str, ...]] | None = None
    unsupported_reason: str = ""
    preload: tuple[str, ...] = ()
    order: int = 0
