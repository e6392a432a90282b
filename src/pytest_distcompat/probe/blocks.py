"""Blocks of a model, and their names in the unwrapped model whatever wraps them now.

A block is one of the equal modules of which a model is made, such as the ``LlamaDecoderLayer``
modules ``model.layers.0`` and ``model.layers.1``. FSDP wraps blocks one by one, and activation
checkpointing and torch.compile may too. Each wrapper inserts a segment into names:
``_fsdp_wrapped_module.layers.0``. ``live`` calls this module for the names that a block has without
them. ``observe`` and ``ext.scripts`` use its small questions about single modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch.nn import Module


def is_a(module: Module, *names: str) -> bool:
    """Tell whether the module's class, or a base of it, has one of these names.

    Unlike ``isinstance`` it needs no import: the library of the class need not be installed.
    """
    return any(base.__name__ in names for base in type(module).__mro__)


def unwrapped(module: Module) -> Module:
    """Return the module inside torch's wrappers, however many there are.

    A module that nothing wraps is returned itself.
    """
    # torch.compile and activation checkpointing have no public attribute for the module that they
    # wrap; ``tests/scripts/test_private_names.py`` fails when the private ones change.
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    while True:
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            module = cast("Module", module.module)
        elif is_a(module, "OptimizedModule"):
            module = cast("Module", module._orig_mod)  # noqa: SLF001 - see above
        elif is_a(module, "ActivationWrapper"):
            module = cast("Module", module._checkpoint_wrapped_module)  # noqa: SLF001 - see above
        else:
            return module


def declared_blocks(model: Module) -> tuple[str, ...]:
    """Return the sorted class names of the blocks that the model declares: ``("BertLayer",)``.

    If it declares none, they are those that its submodules declare: a user's model may have a model
    of transformers inside.
    """
    # ``_no_split_modules`` of transformers and diffusers is private, but accelerate and
    # transformers wrap by it (https://huggingface.co/docs/accelerate/usage_guides/fsdp).
    # ``tests/scripts/test_private_names.py`` fails when it changes.
    declared = set(getattr(model, "_no_split_modules", None) or ())
    if not declared:
        for child in model.children():
            declared.update(declared_blocks(child))
    return tuple(sorted(declared))


def named_blocks(model: Module, classes: Collection[str]) -> tuple[str, ...]:
    """Return the names of the modules of these classes, without segments that wrappers insert."""
    names: list[str] = []
    for name, module in _named_modules(model, "", set()):
        if is_a(module, *classes):
            names.append(name)
    return tuple(names)


def _named_modules(module: Module, name: str, visited: set[Module]) -> Iterator[tuple[str, Module]]:
    """Yield what ``named_modules`` yields, with each module and name unwrapped."""
    module = unwrapped(module)
    if module in visited:
        return
    visited.add(module)
    yield name, module
    for child_name, child in module.named_children():
        yield from _named_modules(child, join(name, child_name), visited)


def join(prefix: str, name: str) -> str:
    """Return the qualified name of ``name`` inside the module named ``prefix``."""
    if not prefix:
        return name
    return f"{prefix}.{name}"


def multiplies(module: Module) -> bool:
    """Tell whether the module only multiplies by a matrix: a Linear or a convolution.

    A subclass that has modules inside, as those of PEFT have, computes more than that.
    """
    from torch import nn

    kinds = (
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
    )
    if not isinstance(module, kinds):
        return False
    return not list(module.children())
