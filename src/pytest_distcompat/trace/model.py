"""Records of a model: its parameters and buffers, before a trainer wraps it and after.

``probe.live`` makes these records on each rank. ``read_unwrapped`` makes an ``UnwrappedInfo`` of
the model that a driver's ``build_model`` returns. ``read_model`` makes a ``ModelInfo`` after each
later action. Checks compare the two: under FSDP2 on 2 ranks an unwrapped ``lm_head.weight`` of
shape (64, 16) must be there as a DTensor of the same shape, of which each rank stores 512 elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_distcompat.trace.layout import WHOLE, Layout


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter or buffer on one rank, of the unwrapped or of the live (wrapped) model."""

    #: The name in its model. A live name may have a wrapper's prefix: ``module.lm_head.weight``.
    name: str
    #: The global shape. Exceptions: a flat parameter of FSDP1 has its own shape, and so has a view
    #: into one ("FSDP1 shard"), which is 1-dimensional.
    shape: tuple[int, ...]
    #: The dtype of the local storage, such as ``bfloat16``.
    dtype: str
    trainable: bool = True
    #: How this rank stores it: ``Tensor``, ``DTensor``, ``FSDP1 shard``, ``FlatParameter`` (FSDP1's
    #: one tensor in place of many) or ``ZeRO-3``.
    kind: str = "Tensor"
    #: Which part of it this rank holds.
    layout: Layout = WHOLE
    #: How many elements this rank stores of it.
    local_numel: int = 0
    #: A digest of those elements: a hash, as text.
    digest: str = ""
    #: How many entries of the optimizer's ``param_groups`` are this very tensor: 1 if it is
    #: optimized, 0 if not. None where the optimizer has flat copies instead (ZeRO).
    held: int | None = None
    #: Of a buffer of the unwrapped model: whether the state dict has it.
    persistent: bool = False
    #: Of a tensor of the unwrapped model: the digest of its values rounded to the dtype in which
    #: the cell's precision computes. Empty if that rounds nothing.
    rounded: str = ""


@dataclass(frozen=True)
class UnwrappedInfo:
    """The model before anything wrapped it: what checks expect of names, shapes and training."""

    parameters: tuple[ParameterInfo, ...]
    buffers: tuple[ParameterInfo, ...] = ()
    #: The keys of its state dict.
    state_dict: tuple[str, ...] = ()
    #: Groups of names that share one parameter: ``(("embed.weight", "lm_head.weight"),)``.
    tied: tuple[tuple[str, ...], ...] = ()
    #: The names of the modules to be wrapped one by one: ``("layers.0", "layers.1")``.
    blocks: tuple[str, ...] = ()
    #: The class names of these modules: ``("LlamaDecoderLayer",)``.
    block_classes: tuple[str, ...] = ()
    #: The names of the modules that are to stay whole.
    ignored_modules: tuple[str, ...] = ()
    #: The number of linear layers that can be converted to 8 bits.
    linears: int = 0
    #: The number of modules that multiply by a matrix, None where they were not counted.
    products: int | None = None
    #: The options of a cell that the driver supports, such as ``compile``. Of these only a check
    #: knows that the trainer was configured with them.
    obeyed: tuple[str, ...] = ()
    #: Names that files may have in place of the model's own (``Driver.written_names``).
    written_names: tuple[str, ...] = ()
    #: The names of the modules in evaluation mode.
    evaluating: tuple[str, ...] = ()
    #: The names of the parameters whose elements lie in another order in memory than in the tensor.
    noncontiguous: tuple[str, ...] = ()
    #: What the gradients are means over, as the driver says: ``token``, ``row``, ``micro_batch``,
    #: ``joint_micro_batch`` or ``rank``; empty if it does not say.
    mean: str = ""


@dataclass(frozen=True)
class ModelInfo:
    """The live model on one rank: the model as the trainer has wrapped it."""

    #: The class name of the outermost module: ``DistributedDataParallel``.
    type: str
    #: Kind of wrapper -> how many of its modules are in the model: ``{"FSDP2": 3}``. The kinds are
    #: ``DDP``, ``FSDP1``, ``FSDP2``, ``DeepSpeedEngine`` and ``OptimizedModule`` (torch.compile).
    wrappers: Mapping[str, int]
    parameters: tuple[ParameterInfo, ...]
    buffers: tuple[ParameterInfo, ...] = ()
    #: The number of ranks of the default process group; 1 without a group.
    world_size: int = 1
    #: The number of ranks that the trainer assumes; None if unknown.
    trainer_world_size: int | None = None
    #: The backend of the process group, such as ``gloo`` or ``nccl``; empty without a group.
    backend: str = ""
    #: The ZeRO stage of DeepSpeed's engine, 0 to 3; None without an engine.
    zero_stage: int | None = None
    #: The live names of the modules that FSDP wraps; the root is ``""``.
    units: tuple[str, ...] = ()
    #: The live names of the modules whose activations are recomputed.
    checkpointed: tuple[str, ...] = ()
    #: The live names of the modules that torch.compile wraps, or that were compiled in place.
    compiled: tuple[str, ...] = ()
    #: The number of layers that compute in 8 bits.
    float8: int = 0
    #: The number of graphs that torch.compile has made in this process.
    graphs: int = 0
    #: The ranks that hold the stages of one pipeline, of which the model is one, in their order;
    #: empty for a whole model.
    pp_ranks: tuple[int, ...] = ()
