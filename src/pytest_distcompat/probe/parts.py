"""Reads a model of which parts were wrapped before the whole was seen: what each part was stays what it was then."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.probe.blocks import declared_blocks, join, named_blocks, unwrapped
from pytest_distcompat.probe.live import _unwrapped, read_unwrapped
from pytest_distcompat.probe.tensors import dtype_name
from pytest_distcompat.trace import ParameterInfo, UnwrappedInfo

if TYPE_CHECKING:
    from torch.nn import Module


def read_parts(model: Module, known: Mapping[int, UnwrappedInfo], blocks: tuple[str, ...] = ()) -> UnwrappedInfo:
    """The unwrapped model, with ``known`` (by ``id`` of the module) for the parts that have been wrapped since.

    ``fully_shard`` is called for blocks before it is for the root, and FSDP1 may be too. ``blocks`` are their class names.
    """
    if not any(id(part) in known for part in model.modules()):
        return _partitioned(model, read_unwrapped(model, blocks))
    found = UnwrappedInfo(())
    for name, part in _parts(model, "", known):
        info = known.get(id(part)) or (
            _own(part) if any(id(one) in known for one in part.modules()) else read_unwrapped(part)
        )
        found = UnwrappedInfo(
            (*found.parameters, *(_under(name, one) for one in info.parameters)),
            (*found.buffers, *(_under(name, one) for one in info.buffers)),
            (*found.state_dict, *(join(name, key) for key in info.state_dict)),
            (*found.tied, *(tuple(join(name, one) for one in group) for group in info.tied)),
            linears=found.linears + info.linears,
            products=(found.products or 0) + (info.products or 0),
        )
    tied = _tied(model)
    classes = blocks or declared_blocks(model)
    again = {name for group in tied for name in group[1:]}
    return dataclasses.replace(
        found,
        parameters=tuple(info for info in found.parameters if info.name not in again),
        tied=(*found.tied, *(group for group in tied if group not in found.tied)),
        blocks=named_blocks(model, classes),
        block_classes=classes,
    )


def _parts(module: Module, name: str, known: Mapping[int, UnwrappedInfo]) -> Iterator[tuple[str, Module]]:
    """The largest parts that are either known or hold nothing that is; and what lies above them, for what it has itself."""
    module = unwrapped(module)
    yield name, module
    if id(module) not in known and any(id(part) in known for part in module.modules()):
        for child, part in module.named_children():
            yield from _parts(part, join(name, child), known)


def _own(module: Module) -> UnwrappedInfo:
    """What the module has by itself, without its children."""
    parameters = tuple(_unwrapped(name, one) for name, one in module.named_parameters(recurse=False))
    loose = _not_saved(module)
    buffers = tuple(
        _unwrapped(name, one, placement="non-persistent" if name in loose else "persistent")
        for name, one in module.named_buffers(recurse=False)
    )
    return UnwrappedInfo(
        parameters, buffers, tuple(info.name for info in (*parameters, *buffers) if info.name not in loose)
    )


def _not_saved(module: Module) -> Collection[str]:
    """The buffers of the module itself that its state dict leaves out. Its ``state_dict()`` tells too, but has children gather
    theirs: all ranks together. Private, ``tests/spawn/test_private_names.py`` says when it goes away.
    """
    return module._non_persistent_buffers_set  # noqa: SLF001 - see the docstring


def _tied(model: Module) -> list[tuple[str, ...]]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def _under(prefix: str, info: ParameterInfo) -> ParameterInfo:
    return dataclasses.replace(info, name=join(prefix, info.name))


def _partitioned(model: Module, unwrapped: UnwrappedInfo) -> UnwrappedInfo:
    """A model made under ``deepspeed.zero.Init`` is partitioned from the start: its parameters tell what they are elsewhere."""
    whole: dict[str, Any] = {name: p for name, p in model.named_parameters() if hasattr(p, "ds_shape")}
    infos = tuple(
        dataclasses.replace(
            info,
            shape=tuple(whole[info.name].ds_shape),
            local_numel=int(whole[info.name].ds_numel),
            dtype=dtype_name(whole[info.name].dtype),
            digest="",
        )
        if info.name in whole
        else info
        for info in unwrapped.parameters
    )
    return dataclasses.replace(unwrapped, parameters=infos)
