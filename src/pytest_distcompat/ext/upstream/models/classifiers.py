"""Tiny models that classify rows of numbers: an MLP, and models with one odd thing each.

Their names are values of option ``model`` of a cell, one configuration under test, as
``fsdp2-fp32-w2-model_twice``. An entry point names this module, whose ``TinyModel`` objects the
registry ``models.MODELS`` collects. A ``TinyModel`` is a set of functions that a driver calls on
each rank: to make the model, its batches, its loss, and to load its exported file.

Each model has something that libraries may get wrong: uneven shards, an empty parameter, a block
that runs twice, experts. So fields of its ``TinyModel`` say how it may be used: ``only_float32``
(rounding decides what it computes), ``one_batch`` (it computes over the rows of all ranks),
``unused`` (a rank may leave a parameter out), ``random``, and ``spread``, a factor on the loss
tolerance of lower precisions, as ``Precision.loss_tolerance`` has it. The numbers "measured" below
are relative differences of losses from the reference, for which the factor leaves a margin.

The module classes are in ``modules.py``, which imports torch; they are
named by a text here, as pytest's process imports no torch. All map four rows of 7 numbers, the
features, to logits of 5 classes.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.models import LayerByLayer, TinyModel

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.models import Batch

#: Numbers in a row, hidden size, and classes.
FEATURES, WIDTH, CLASSES = 7, 13, 5


def _classifier(name: str, class_name: str, width: int = WIDTH, **fields: Any) -> TinyModel:
    """Return the model of a class of ``modules``, with further fields of TinyModel.

    Args:
        name: The value of option ``model``.
        class_name: Name of the class in ``modules``.
        width: Its hidden size.
        fields: Fields of ``TinyModel`` that differ from the common ones.
    """
    common: dict[str, Any] = {
        "make": functools.partial(_make, class_name, width),
        "batch": _batch,
        "loss": _loss,
        "count": _count,
        "outputs": _outputs,
        "reload": functools.partial(_reload, class_name, width),
        # The class whose modules FSDP wraps one by one. Most models have a single such module.
        "blocks": ("Block",),
        "one_block": True,
        # What option ``frozen`` freezes: the first layer.
        "frozen_modules": ("inlet",),
        # How many parameters make an FSDP unit where the wrap policy goes by size.
        "unit_size": 200,
        # Products in 8 bits need sizes that 16 divides.
        "in_8_bits": False,
        "preload": ("pytest_distcompat.ext.upstream.models.modules", "safetensors.torch"),
        # Measured in bf16_upcast: 1.3e-3 with autocast over float32 masters under DDP, 2.0e-3 with
        # layers split over four ranks, or compiled. With bfloat16 masters it is 2.7e-3.
        "spread": 2.2,
        # 2.2e-3 measured on an H100 in bf16_upcast (accelerate, DeepSpeed), where products are
        # added up in another order.
        "gpu_spread": 3.0,
        # Measured in one process on the rows of one to four ranks: 0.13 (a bias of
        # ``convolutions``), 0.10 (``twice``), 0.09 (``scalar``); 0.22 (``wrapper_names``) on those
        # of one rank. Checks leave a margin.
        "gradient_rounding": 0.12,
    }
    return TinyModel(name, **{**common, **fields})


def _make(class_name: str, width: int) -> Module:
    """Return a new model of a class of ``modules``."""
    from pytest_distcompat.ext.upstream.models import modules

    model: Module = getattr(modules, class_name)(FEATURES, width, CLASSES)
    return model


def _batch(step: int, rank: int) -> Batch:
    """Return four rows, the same for the same numbers in every process."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        "features": torch.randn(4, FEATURES, generator=generator),
        "labels": torch.randint(0, CLASSES, (4,), generator=generator),
    }


def _batch_of_branch(step: int, rank: int) -> Batch:
    """Return rows that all need the layer of the model ``branch``, or of which none does.

    Those whose first feature is positive need it. In each step those of every second rank do.
    """
    batch = _batch(step, rank)
    sign = 1 if (step + rank) % 2 else -1
    features = batch["features"]
    features[:, 0] = sign * features[:, 0].abs()
    return batch


def _loss(model: Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross entropy over rows, in float32."""
    return _loss_of(model(batch["features"]), batch["labels"])


def _loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of logits over rows, in float32."""
    from torch.nn import functional

    return functional.cross_entropy(logits.float(), labels)


def _count(batch: Batch) -> int:
    """Return the number of rows."""
    return len(batch["labels"])


def _outputs(model: Module, batch: Batch) -> torch.Tensor:
    """Return the logits: (rows, classes)."""
    logits: torch.Tensor = model(batch["features"])
    return logits


def _reload(class_name: str, width: int, directory: Path) -> Module:
    """Load an exported state dict, key by key: an nn.Module has no loader of its own."""
    from safetensors.torch import load_file

    model = _make(class_name, width)
    saved = load_file(directory / "model.safetensors")
    for name, parameter in model.named_parameters():
        # load_state_dict copies into the parameters, which would round or widen what was saved.
        if name in saved:
            parameter.data = parameter.data.to(saved[name].dtype)
    model.load_state_dict(saved)
    return model


def _layers(model: Any) -> list[Any]:
    """Return the layers of the model ``layers``."""
    return list(model)


def _tied_layers(model: Any) -> list[Any]:
    """Return the layers of the model ``layers_tied``; the last one is the first, turned round."""
    from deepspeed.pipe import TiedLayerSpec

    from pytest_distcompat.ext.upstream.models.modules import Ends, Given

    ends = model.tied_modules["ends"]
    first = TiedLayerSpec("ends", Given, ends)
    last = TiedLayerSpec("ends", Given, ends, forward_fn=Ends.back)
    blocks = [model.get_submodule(name) for name in ("1", "2", "3")]
    return [first, *blocks, last]


def _tp_plan(*layers: str) -> dict[str, str]:
    """Return a plan of tensor parallelism: name of a layer -> how ``tensor_parallel`` cuts it.

    Each rank has full activations between the layers: they are gathered after a layer that is cut
    by columns, and split before the last one, which is cut by rows.

    Args:
        layers: Names of the layers between inlet and outlet.
    """
    plan = dict.fromkeys(("inlet", *layers), "colwise_gather")
    plan["outlet"] = "rowwise_split"
    return plan


#: MLP as nn.Module: odd sizes (uneven shards, of thirteen features), a persistent and a
#: non-persistent buffer, a frozen layer.
MLP_MODEL = _classifier(
    "mlp",
    "MLP",
    one_block=False,
    ignored_module="frozen",
    tp_plan=_tp_plan("blocks.*.linear"),
    order=2,
)
#: One block that each forward uses two times, and a layer whose weight is used outside its own
#: forward. The parameters are views of one storage, and the model hands attributes that it lacks on
#: to its block.
TWICE = _classifier("twice", "Twice", order=3)
#: Parameters and buffers as no library's own model has them: empty, smaller than the ranks, of many
#: dtypes.
ODD = _classifier("odd", "Odd", order=4)
#: A parameter of no dimension, as a learned temperature is.
SCALAR = _classifier("scalar", "Scalar", order=5)
#: A parameter that is not contiguous, as a weight that was loaded transposed.
TRANSPOSED = _classifier("transposed", "Transposed", order=6)
#: A layer that half of the ranks leave out in each step, as a model for several tasks does.
BRANCH = _classifier("branch", "Branch", batch=_batch_of_branch, unused=True, order=7)
#: Dropout in each block: every forward draws random numbers.
DROPOUT = _classifier("dropout", "Dropout", tp_plan=_tp_plan("block.linear"), random=True, order=7)
#: Modules with names such as ``_fsdp_wrapped_module``, under which wrappers keep what they wrap:
#: trainers take these out of names.
WRAPPER_NAMES = _classifier("wrapper_names", "WrapperNames", order=7)
#: BatchNorm, whose buffers each rank fills from its own data. Rounding in bfloat16 decides the
#: statistics of a few rows, so it is trained in float32 only.
BATCHNORM = _classifier("batchnorm", "BatchNorm", only_float32=True, order=9)
#: SyncBatchNorm, whose statistics are those of the rows of all ranks. Measured with torch 2.13,
#: whose DDP says of the module: "SyncBatchNorm layers only work with GPU modules".
SYNCBATCHNORM = _classifier(
    "syncbatchnorm",
    "SyncBatchNorm",
    only_float32=True,
    one_batch=True,
    not_on_cpu=(
        "torch's SyncBatchNorm refuses CPU tensors: "
        "'SyncBatchNorm expected input tensor to be on GPU or XPU'"
    ),
    order=9,
)
#: Mixture of experts: each row goes to one of them, and an expert may get none on a rank. 1.7e-3
#: measured in bf16_upcast (torch).
MOE = _classifier("moe", "MixtureOfExperts", spread=2.5, order=10)
#: Mixture of experts whose weights are one tensor, which expert parallelism can shard. As
#: torchtitan has it: the router is replicated, experts are sharded by the driver
#: (``parallel/expert_parallel.py``).
MOE_FUSED = _classifier(
    "moe_fused",
    "FusedMixture",
    blocks=("Block", "Experts"),
    experts="experts",
    tp_plan=_tp_plan("block.linear"),
    spread=2.5,
    order=11,
)
#: Mixture of experts by DeepSpeed's own layer, whose experts its engine can spread over ranks. Only
#: the driver for DeepSpeed trains it.
MOE_DEEPSPEED = _classifier(
    "moe_deepspeed",
    "DeepSpeedMixture",
    frozen_modules=(),
    experts="moe",
    driver="deepspeed",
    spread=2.5,
    order=12,
)
#: Convolutions, whose weights have three dimensions, one of them in groups of channels.
CONVOLUTIONS = _classifier(
    "convolutions", "Convolutions", lora_targets=("widen", "grouped", "linear"), order=13
)
#: A backward pass within the backward pass, by DeepSpeed's tiled computation, which needs its
#: engine.
TILED = _classifier("tiled", "Tiled", only_zero=True, order=14)
#: Operators between split layers, which see DTensors under tensor parallelism. Rounding decides
#: which head is the strongest, so it is trained in float32 only.
HEADS = _classifier(
    "heads",
    "Heads",
    width=8,
    frozen_modules=("block",),
    only_float32=True,
    tp_plan={"inlet": "colwise_dtensor", "mix": "rowwise_split", "block.linear": "colwise_gather"},
    order=15,
)
#: MLP whose layers are wide enough for quantized optimizer state, also where four ranks shard them;
#: its largest matrix has 128 x 128 elements. 2.1e-3 measured in bf16_upcast, with optimizer state
#: in 8 bits up to 6.8e-3.
WIDE = _classifier(
    "wide", "MLP", 128, ignored_module="frozen", largest=128**2, spread=10.0, order=16
)
#: A run of layers, as DeepSpeed's pipelines take it.
LAYERS = _classifier(
    "layers",
    "Layers",
    one_block=False,
    frozen_modules=("0",),
    layers=LayerByLayer(_layers, 4, "features", _loss_of),
    order=17,
)
#: A run of layers whose first and last one have one weight, so that two stages have it.
LAYERS_TIED = _classifier(
    "layers_tied",
    "TiedLayers",
    one_block=False,
    frozen_modules=("1",),
    layers=LayerByLayer(_tied_layers, 5, "features", _loss_of),
    # 8.3e-2 measured in bf16_upcast (DeepSpeed, the rows of one rank), in the eleventh step.
    norm_spread=6.0,
    order=18,
)
