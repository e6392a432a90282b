"""Reader of a model whose parts were wrapped before the whole was: each part as it was before its own wrapping."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.probe.blocks import declared_blocks, join, named_blocks, unwrapped
from pytest_distcompat.probe.live import parameter_info, read_unwrapped, tied_names
from pytest_distcompat.probe.tensors import dtype_name
from pytest_distcompat.trace import ParameterInfo, UnwrappedInfo

if TYPE_CHECKING:
    from torch.nn import Module


def read_parts(model: Module, known: Mapping[int, UnwrappedInfo], blocks: tuple[str, ...] = ()) -> UnwrappedInfo:
    """Return the unwrapped model, taking parts that were wrapped since from ``known``, by the ``id`` of the module."""
    # ``fully_shard`` is called for blocks before it is called for the root, and FSDP1 may be too.
    if not any(id(part) in known for part in model.modules()):
        return _partitioned(model, read_unwrapped(model, blocks))
    merged = UnwrappedInfo(())
    for name, part in _parts(model, "", known):
        info = known.get(id(part)) or (
            _read_without_children(part)
            if any(id(module) in known for module in part.modules())
            else read_unwrapped(part)
        )
        merged = UnwrappedInfo(
            (*merged.parameters, *(_under(name, one) for one in info.parameters)),
            (*merged.buffers, *(_under(name, one) for one in info.buffers)),
            (*merged.state_dict, *(join(name, key) for key in info.state_dict)),
            (*merged.tied, *(tuple(join(name, one) for one in group) for group in info.tied)),
            linears=merged.linears + info.linears,
            products=(merged.products or 0) + (info.products or 0),
        )
    tied = tied_names(model)
    classes = blocks or declared_blocks(model)
    duplicates = {name for group in tied for name in group[1:]}
    return dataclasses.replace(
        merged,
        parameters=tuple(info for info in merged.parameters if info.name not in duplicates),
        tied=(*merged.tied, *(group for group in tied if group not in merged.tied)),
        blocks=named_blocks(model, classes),
        block_classes=classes,
    )


def _parts(module: Module, name: str, known: Mapping[int, UnwrappedInfo]) -> Iterator[tuple[str, Module]]:
    """Yield the largest modules that are known or hold no known module, and the modules above those."""
    module = unwrapped(module)
    yield name, module
    if id(module) not in known and any(id(part) in known for part in module.modules()):
        for child, part in module.named_children():
            yield from _parts(part, join(name, child), known)


def _read_without_children(module: Module) -> UnwrappedInfo:
    """Return the parameters and buffers of the module itself, without those of its children."""
    parameters = tuple(parameter_info(name, one) for name, one in module.named_parameters(recurse=False))
    not_saved = _not_saved(module)
    buffers = tuple(
        parameter_info(name, one, persistent=name not in not_saved) for name, one in module.named_buffers(recurse=False)
    )
    return UnwrappedInfo(
        parameters, buffers, tuple(info.name for info in (*parameters, *buffers) if info.name not in not_saved)
    )


def _not_saved(module: Module) -> Collection[str]:
    """Return the names of the module's own buffers that its state dict leaves out."""
    # Comparing with ``state_dict()`` is no alternative, because it lets wrapped children gather theirs in a collective. The
    # attribute is private; ``tests/launch/test_private_names.py`` fails when it changes.
    return module._non_persistent_buffers_set  # noqa: SLF001 - see above


def _under(prefix: str, info: ParameterInfo) -> ParameterInfo:
    return dataclasses.replace(info, name=join(prefix, info.name))


def _partitioned(model: Module, unwrapped: UnwrappedInfo) -> UnwrappedInfo:
    """Return ``unwrapped`` with the full shapes of parameters that ``deepspeed.zero.Init`` partitioned when it made them."""
    partitioned: dict[str, Any] = {name: p for name, p in model.named_parameters() if hasattr(p, "ds_shape")}
    infos = tuple(
        dataclasses.replace(
            info,
            shape=tuple(partitioned[info.name].ds_shape),
            local_numel=int(partitioned[info.name].ds_numel),
            dtype=dtype_name(partitioned[info.name].dtype),
            digest="",
        )
        if info.name in partitioned
        else info
        for info in unwrapped.parameters
    )
    return dataclasses.replace(unwrapped, parameters=infos)
