"""How plain torch says the options of a cell that are no matter of the strategy: recompute, compile, 8 bits, whole files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.cell import Cell


def unsupported_by_accelerate(cell: Cell, device: str) -> str | None:
    """What accelerate, and Trainer by it, cannot do with FSDP; None for all else."""
    if cell.strategy == "fsdp1" and cell.option("activation_checkpointing") and cell.option("wrap_policy") == "size":
        # It would hang: no verdict could be had of it, and a known issue never covers a hang.
        return (
            "recomputed modules then hold several of FSDP1's units: one rank gathers for the recomputation while another "
            "reduces gradients, and both wait (docs/upstream.md)"
        )
    if cell.strategy == "fsdp1" and cell.option("dp_replicate") != 1:
        return "accelerate's ParallelismConfig is for FSDP2; FSDP1's hybrid shards are those of a machine, of which there is one"
    if device != "cpu":
        return None
    if cell.strategy == "fsdp1" and cell.option("state_dict") == "full":
        return (
            "accelerate gathers FSDP1's full state dict with offload to the CPU, which on CPU ranks is a segmentation "
            "fault in torch (https://github.com/pytorch/pytorch/issues/188989)"
        )
    if cell.strategy == "fsdp2" and cell.option("cpu_offload"):
        return "accelerate offloads through pinned memory, which needs a GPU"
    return None


def recompute_by_model(model: Any, blocks: Iterable[Module]) -> None:
    """The model's own way where it has one, as transformers' models have; else the wrapper around each block."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    else:
        recompute(model, blocks)


def merge_shards(accelerator: Any, model: Any, directory: Path) -> None:
    """FSDP1's weights in one file by way of a sharded checkpoint and accelerate's documented merge.

    For CPU ranks, where gathering crashes torch: https://huggingface.co/docs/accelerate/usage_guides/fsdp
    """
    from accelerate.utils import merge_fsdp_weights, save_fsdp_model

    shards = directory.parent / "shards"
    save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(shards), 0)
    # On every rank: it waits for all of them.
    merge_fsdp_weights(str(shards / "pytorch_model_fsdp_0"), str(directory))


def whole_state(model: Module) -> dict[str, Any]:
    """The whole state dict, by torch; without the offload that crashes FSDP1 on CPU ranks, hence on every rank for it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def recompute(model: Module, blocks: Iterable[Module]) -> None:
    """Activation checkpointing around each block, in place.

    torch has the wrapper under a private path only, which its own FSDP tutorial uses;
    ``tests/spawn/test_private_names.py`` says when it goes away.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    chosen = set(blocks)
    apply_activation_checkpointing(model, check_fn=lambda module: module in chosen)


def in_place(how: object) -> bool:
    """Whether that value of option ``compile`` leaves the model what it is, and compiles blocks inside."""
    return how in {"regional", "partial"}


def compile_blocks(how: object, blocks: list[Module]) -> None:
    """``regional``: each block by itself; ``partial``: the first only. By aot_eager: names do not depend on the backend."""
    for block in blocks if how == "regional" else blocks[:1]:
        block.compile(backend="aot_eager")


def compiled(model: Any, how: object) -> Any:
    """The whole model compiled: by inductor, or by the backend that the option names."""
    import torch

    return torch.compile(model, backend="inductor" if how is True else str(how))


def in_8_bits(model: Module, device: str) -> Module:
    """Float8 layers of torchao for every linear layer but the last, whose output is the loss's input.

    Emulated on the CPU: https://github.com/pytorch/ao/blob/main/torchao/float8/README.md.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    last = list(model.named_modules())[-1][0]
    converted: Module = convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=device == "cpu"),
        # In 8 bits a product needs sizes that 16 divides.
        module_filter_fn=lambda module, name: (
            name != last and not (module.in_features % 16 or module.out_features % 16)
        ),
    )
    return converted


def write_whole(model: Any, state: Mapping[str, Any], directory: Path) -> None:
    """The weights as one safetensors file, beside the configuration if the model has one; an adapter in PEFT's form."""
    from safetensors.torch import save_file

    if hasattr(model, "peft_config"):
        model.save_pretrained(directory, state_dict=state)
        return
    if hasattr(model, "config"):
        model.config.save_pretrained(directory)
    # Tied weights are one tensor under two names, which safetensors does not take.
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
    save_file(own, directory / "model.safetensors", metadata={"format": "pt"})
