"""Options of a cell that do not depend on the strategy, for several drivers.

A cell is one configuration under test; the cell ``fsdp2-fp32-w2-activation_checkpointing`` has an
option. The built-in drivers, by which trainers are tested, call this module for what they do alike:

- at collection, ``OF_ALL`` and ``unsupported_by_accelerate``: which options a driver has;
- in ``build``, activation checkpointing, compilation and layers in 8 bits, on the model before or
  after the strategy wraps it. *Blocks* are the modules that are treated one by one, such as the
  layers of a Llama;
- in ``step``, ``clip_on_meshes``;
- in ``export``, weights in one file.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.parallel.reasons import first_reason

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell


#: Names of the options that all built-in drivers have.
OF_ALL = (
    "model",
    "compile",
    "activation_checkpointing",
    "grad_accum",
    "cpu_offload",
    "tp",
    "cp",
    "frozen",
    "lora",
    "float32_norms",
    "reduce_dtype",
    "optimizer",
    "checkpoints",
    "set",
)
#: Those that the drivers which run FSDP have besides.
OF_FSDP = ("state_dict", "reshard_after_forward", "dp_replicate", "use_orig_params")
#: Why a sequence is not cut by accelerate and Trainer under FSDP2. Measured with torch 2.13.
TORCH_CP = (
    "accelerate's cp_size is torch's context_parallel, not driven yet: on the CPU attention "
    "'does not have a sharding strategy registered'"
)
#: Why tensor parallelism under ZeRO is not that of accelerate or Trainer.
AUTOTP = "DeepSpeed's own tensor parallelism (AutoTP) is driven by the deepspeed driver alone"


def unsupported_by_accelerate(cell: Cell, device: str) -> str | None:
    """Return why accelerate, and Trainer with it, cannot run the cell; None if they can."""
    fsdp1 = cell.strategy == "fsdp1"
    one_file = cell.option("state_dict") == "full"
    several_files = fsdp1 or (cell.strategy == "fsdp2" and not one_file)
    return first_reason(
        # It would hang, and a known issue never covers a hang.
        (
            fsdp1
            and bool(cell.option("activation_checkpointing"))
            and cell.option("wrap_policy") == "size",
            (
                "recomputed modules then hold several of FSDP1's units: one rank gathers for the "
                "recomputation while another reduces gradients, and both wait (docs/upstream.md)"
            ),
        ),
        (
            cell.own_disks and several_files,
            (
                "of FSDP's files accelerate writes some on rank 0 alone that all ranks read "
                "(https://github.com/huggingface/accelerate/issues/3010)"
            ),
        ),
        (
            fsdp1 and cell.option("dp_replicate") != 1,
            (
                "accelerate's ParallelismConfig is for FSDP2; FSDP1's hybrid shards are those of a "
                "machine, of which there is one"
            ),
        ),
        (
            device == "cpu" and fsdp1 and one_file,
            (
                "accelerate gathers FSDP1's full state dict with offload to the CPU, which on CPU "
                "ranks is a segmentation fault in torch "
                "(https://github.com/pytorch/pytorch/issues/188989)"
            ),
        ),
        (
            device == "cpu" and cell.strategy == "fsdp2" and bool(cell.option("cpu_offload")),
            "accelerate offloads through pinned memory, which needs a GPU",
        ),
    )


def recompute_by_model(model: Any, blocks: Iterable[Module], cell: Cell) -> None:
    """Turn on activation checkpointing by the model's own method, or wrap each block.

    Models of transformers have such a method. It acts in training mode only.
    """
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=recomputation(cell))
        model.train()
    else:
        recompute(model, blocks, cell)


def recomputation(cell: Cell) -> dict[str, Any]:
    """Return the arguments of ``torch.utils.checkpoint.checkpoint`` as the cell sets them."""
    reentrant = cell.option("activation_checkpointing") == "reentrant"
    return cell.with_settings("checkpoint", {"use_reentrant": reentrant})


def merge_shards(accelerator: Any, model: Any, directory: Path, *, lora: bool) -> None:
    """Write FSDP1's weights on CPU ranks by accelerate's merge of a sharded checkpoint.

    Gathering them crashes torch there. https://huggingface.co/docs/accelerate/usage_guides/fsdp

    Args:
        accelerator: The Accelerator that prepared the model.
        model: The wrapped model.
        directory: The weights are written there, the checkpoint beside it.
        lora: Whether the model has an adapter, which is written alone.
    """
    from accelerate.utils import merge_fsdp_weights, save_fsdp_model

    unwrapped = accelerator.unwrap_model(model)
    main = accelerator.is_main_process
    if lora:
        unwrapped.save_pretrained(directory, is_main_process=main, state_dict=whole_state(model))
        return
    shards = directory.parent / "shards"
    save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(shards), 0)
    # On every rank: the merge has a barrier.
    merge_fsdp_weights(str(shards / "pytorch_model_fsdp_0"), str(directory))
    if main and hasattr(unwrapped, "config"):
        write_config(unwrapped.config, directory)


def whole_state(model: Module) -> dict[str, Any]:
    """Return the full state dict on every rank: parameter names -> whole tensors.

    Without the offload to the CPU, which crashes FSDP1 on CPU ranks.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def clip_on_meshes(
    parameters: Iterable[torch.Tensor], max_norm: float, stages: Any = None
) -> float:
    """Clip gradients of parameters on different meshes, and return their norm.

    Under tensor and expert parallelism, for example, experts are on another mesh than the other
    layers. torch's own function cannot add up norms of different meshes.

    Args:
        parameters: The parameters, whose gradients are changed in place.
        max_norm: The norm to clip to.
        stages: The process group of the stages of a pipeline, for the norm over all of them; None
            without a pipeline.
    """
    import torch
    from torch.nn.utils import get_total_norm

    # Mesh of a DTensor, or None for plain tensors -> gradients.
    gradients_by_mesh: dict[Any, list[Any]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = getattr(parameter.grad, "device_mesh", None)
            gradients_by_mesh[mesh].append(parameter.grad)
    mesh_norms: list[Any] = []
    full_norms: list[float] = []
    for gradients in gradients_by_mesh.values():
        mesh_norm: Any = get_total_norm(gradients)
        mesh_norms.append(mesh_norm)
        if hasattr(mesh_norm, "full_tensor"):
            # The norm of DTensors is a DTensor too, of which each rank has a part.
            mesh_norm = mesh_norm.full_tensor()
        full_norms.append(float(mesh_norm))
    norm = math.hypot(*full_norms)
    if stages is not None:
        square = torch.tensor(norm**2, device=mesh_norms[0].device)
        torch.distributed.all_reduce(square, group=stages)
        norm = math.sqrt(square)
    # As in ``torch.nn.utils.clip_grad_norm_``.
    factor = min(1.0, max_norm / (norm + 1e-6))
    for gradients in gradients_by_mesh.values():
        for gradient in gradients:
            gradient.mul_(factor)
    return norm


def recompute(model: Module, blocks: Iterable[Module], cell: Cell) -> None:
    """Wrap each block in activation checkpointing, in place.

    In mode ``selective`` matrix products are not computed again. The cell's settings of
    ``checkpoint`` are arguments of ``torch.utils.checkpoint.checkpoint``.
    """
    # torch has the wrapper under a private path only, which its own FSDP tutorial uses;
    # ``tests/launch/test_private_names.py`` fails when it goes away.
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    recomputed = set(blocks)
    settings = recomputation(cell)
    if settings.pop("use_reentrant"):
        settings["checkpoint_impl"] = CheckpointImpl.REENTRANT
    if cell.option("activation_checkpointing") == "selective":
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        settings["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _products()
        )
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, **settings),
        check_fn=lambda module: module in recomputed,
    )


def recompute_by_deepspeed(blocks: Iterable[Module], config: Mapping[str, Any]) -> None:
    """Have ``deepspeed.checkpointing`` run the forward of each block, as the JSON configures it."""
    # https://deepspeed.readthedocs.io/en/latest/activation-checkpointing.html
    import deepspeed

    deepspeed.checkpointing.configure(None, deepspeed_config=dict(config))
    for block in blocks:
        block.forward = functools.partial(deepspeed.checkpointing.checkpoint, block.forward)


def _products() -> list[Any]:
    """Return the operators that multiply matrices, attention's among them."""
    import torch

    aten = torch.ops.aten
    operators = [aten.mm, aten.addmm, aten.bmm, aten.baddbmm]
    # Attention calls one of these, by device and dtype.
    for kernel in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
    ):
        operators.append(getattr(aten, f"_scaled_dot_product_{kernel}"))
    return [operator.default for operator in operators]


def compile_blocks(mode: object, blocks: list[Module]) -> None:
    """Compile blocks in place by aot_eager.

    Args:
        mode: Option ``compile``: all of them for ``regional``, the first one for ``partial``.
        blocks: The blocks.
    """
    compiled_blocks = blocks if mode == "regional" else blocks[:1]
    for block in compiled_blocks:
        block.compile(backend="aot_eager")


def compiled(model: Any, cell: Cell) -> Any:
    """Return the model wrapped by torch.compile, with the backend of option ``compile``."""
    import torch

    mode = cell.option("compile")
    backend = "inductor" if mode is True else str(mode)
    return torch.compile(model, **cell.with_settings("compile", {"backend": backend}))


def in_8_bits(model: Module, device: str) -> Module:
    """Convert linear layers to torchao's float8 layer, and return the model.

    They are all but the last one and those of odd sizes.

    Args:
        model: The unwrapped model.
        device: ``cpu``, or a GPU's.
    """
    # Emulated on the CPU: https://github.com/pytorch/ao/blob/main/torchao/float8/README.md.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    last, _ = list(model.named_modules())[-1]

    def is_converted(layer: Any, name: str) -> bool:
        # A product in 8 bits needs sizes divisible by 16.
        remainders = (layer.in_features % 16, layer.out_features % 16)
        return name != last and remainders == (0, 0)

    converted: Module = convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=device == "cpu"),
        module_filter_fn=is_converted,
    )
    return converted


def write_whole(model: Any, state: Mapping[str, Any], directory: Path) -> None:
    """Write the weights to one safetensors file, and the configuration if the model has one.

    An adapter is written alone, in PEFT's format.

    Args:
        model: The unwrapped model.
        state: Its whole weights by name.
        directory: The files are written there.
    """
    from safetensors.torch import save_file

    if hasattr(model, "peft_config"):
        model.save_pretrained(directory, state_dict=state)
        return
    copies = {}
    for name, tensor in state.items():
        # safetensors does not accept tied weights, one tensor under two names.
        copy = tensor.detach().cpu().clone()
        copies[name] = copy.contiguous()
    save_file(copies, directory / "model.safetensors", metadata={"format": "pt"})
    if hasattr(model, "config"):
        write_config(model.config, directory)


def write_config(config: Any, directory: Path) -> None:
    """Write the config of a model of transformers beside its weights, with their dtype.

    A model that was loaded in bfloat16 says so in its config, and ``from_pretrained`` would round
    the float32 masters of an export to it. The library's own ``save_pretrained`` writes the dtype
    of what it saves, too.

    Args:
        config: The config.
        directory: Where the weights are, in safetensors files.
    """
    import torch

    from pytest_distcompat.probe.files import read_files

    written = copy.deepcopy(config)
    # It was called ``torch_dtype`` before transformers 4.56.
    name = "dtype" if hasattr(config, "dtype") else "torch_dtype"
    if getattr(config, name, None) is not None:
        for file in read_files(directory):
            for dtype in file.dtypes.values():
                if "float" in dtype:
                    setattr(written, name, getattr(torch, dtype))
    written.save_pretrained(directory)
