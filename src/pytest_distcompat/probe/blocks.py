"""Which modules of a model are its blocks, and what they are called in the unwrapped model, whatever wraps them by now."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch.nn import Module


def is_a(module: Module, *names: str) -> bool:
    """Whether the module is of a class of such a name, which need not be importable, by any of its bases.

    ``fully_shard`` makes a class of its own of the one it is given: ``FSDPLlamaDecoderLayer``.
    """
    return any(base.__name__ in names for base in type(module).__mro__)


def unwrapped(module: Module) -> Module:
    """The module that a wrapper of torch's holds, at any depth; the module itself if it is none.

    From what torch.compile and activation checkpointing return no public way leads back to what they were given;
    ``tests/scripts/test_private_names.py`` says when these go away.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    while True:
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            module = cast("Module", module.module)
        elif is_a(module, "OptimizedModule"):
            module = cast("Module", module._orig_mod)  # noqa: SLF001 - as said above
        elif is_a(module, "ActivationWrapper"):
            module = cast("Module", module._checkpoint_wrapped_module)  # noqa: SLF001 - as said above
        else:
            return module


def declared_blocks(model: Module) -> tuple[str, ...]:
    """Class names of the blocks as the model itself declares them, or else as the largest parts that do; sorted.

    By ``_no_split_modules`` of transformers and diffusers: private, but there is no other word for it, and accelerate's wrapping
    and transformers' go by it (https://huggingface.co/docs/accelerate/usage_guides/fsdp). PEFT passes on that of the
    model inside. ``tests/scripts/test_private_names.py`` says when it goes away.
    """
    found = set(getattr(model, "_no_split_modules", None) or ())
    return tuple(sorted(found or {name for part in model.children() for name in declared_blocks(part)}))


def named_blocks(model: Module, classes: Collection[str]) -> tuple[str, ...]:
    """The names of the modules of these classes, without the segments that wrappers have put in between."""
    return tuple(name for name, module in _named(model, "", set()) if is_a(module, *classes))


def _named(module: Module, name: str, seen: set[Module]) -> Iterator[tuple[str, Module]]:
    module = unwrapped(module)
    if module not in seen:
        seen.add(module)
        yield name, module
        for child, part in module.named_children():
            yield from _named(part, join(name, child), seen)


def join(prefix: str, name: str) -> str:
    """The name of what is called ``name`` inside of the module called ``prefix``."""
    return f"{prefix}.{name}" if prefix else name


def multiplies(module: Module) -> bool:
    """Whether it is a layer that multiplies by a matrix and does nothing else: a Linear or a convolution."""
    from torch import nn

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return isinstance(module, kinds) and not list(module.children())
