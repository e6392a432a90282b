"""Reader of a model of which a user's script has wrapped some modules already.

``live.read_unwrapped`` reads a model before anything wraps it. A script that calls ``fully_shard``
for each block (``layers.0``, ``layers.1``) and then for the root never shows the whole model
unwrapped. So ``ext.scripts`` calls ``read_parts`` each time before the script wraps a module: for
each block, and at last for the root. The result for the root is put together from what was read of
each block before it was wrapped, and from what is still unwrapped. It is the ``UnwrappedInfo`` that
``read_unwrapped`` would have returned at the beginning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_distcompat.probe.blocks import declared_blocks, join, named_blocks, unwrapped
from pytest_distcompat.probe.live import parameter_info, read_unwrapped, tied_names
from pytest_distcompat.probe.tensors import dtype_name
from pytest_distcompat.trace import ParameterInfo, UnwrappedInfo

if TYPE_CHECKING:
    from torch.nn import Module


def read_parts(
    model: Module, known: Mapping[int, UnwrappedInfo], blocks: tuple[str, ...] = ()
) -> UnwrappedInfo:
    """Return what ``read_unwrapped`` returned before a script wrapped some modules of the model.

    Example: a script has called ``fully_shard`` for ``layers.0`` and ``layers.1``, and is about to
    call it for the root. Both layers are in ``known``, read before they were sharded. The rest of
    the model, such as ``embed``, is read now. The result has all parameters in one list, under the
    names that they have in the whole model.

    Args:
        model: The model, whose root is not wrapped yet.
        known: By the ``id`` of each wrapped module, what was read of it just before it was wrapped.
        blocks: Class names of the modules to wrap one by one; empty for those that the model
            declares.
    """
    # ``fully_shard`` is called for blocks before it is called for the root, and FSDP1 may be too.
    if not _contains_known(model, known):
        # Nothing is wrapped yet, but ``deepspeed.zero.Init`` may have sharded the parameters.
        return _partitioned(model, read_unwrapped(model, blocks))
    parameters: list[ParameterInfo] = []
    buffers: list[ParameterInfo] = []
    state_dict: list[str] = []
    tied_in_parts: list[tuple[str, ...]] = []
    # How many layers can be converted to 8 bits, and how many modules multiply by a matrix; the
    # latter is None of a part where they were not counted.
    linears = 0
    products = 0
    for name, module in _parts(model, "", known):
        part = _with_prefix(name, _read_part(module, known))
        parameters += part.parameters
        buffers += part.buffers
        state_dict += part.state_dict
        tied_in_parts += part.tied
        linears += part.linears
        products += part.products or 0
    # Names that share a parameter across two parts, such as an embedding and the output layer, are
    # tied in neither part alone.
    tied_in_model = tied_names(model)
    tied_across_parts: list[tuple[str, ...]] = []
    for group in tied_in_model:
        if group not in tied_in_parts:
            tied_across_parts.append(group)
    # Blocks are the modules to wrap one by one. Models of transformers declare their classes.
    classes = blocks or declared_blocks(model)
    return UnwrappedInfo(
        tuple(_without_duplicates(parameters, tied_in_model)),
        tuple(buffers),
        tuple(state_dict),
        (*tied_in_parts, *tied_across_parts),
        blocks=named_blocks(model, classes),
        block_classes=classes,
        linears=linears,
        products=products,
    )


def _with_prefix(prefix: str, info: UnwrappedInfo) -> UnwrappedInfo:
    """Return what was read of a module, with ``prefix`` before each name."""

    def renamed(infos: Iterable[ParameterInfo]) -> tuple[ParameterInfo, ...]:
        with_prefix: list[ParameterInfo] = []
        for tensor_info in infos:
            name = join(prefix, tensor_info.name)
            with_prefix.append(replace(tensor_info, name=name))
        return tuple(with_prefix)

    tied: list[tuple[str, ...]] = []
    for group in info.tied:
        names = [join(prefix, name) for name in group]
        tied.append(tuple(names))
    return replace(
        info,
        parameters=renamed(info.parameters),
        buffers=renamed(info.buffers),
        state_dict=tuple(join(prefix, key) for key in info.state_dict),
        tied=tuple(tied),
    )


def _without_duplicates(
    parameters: list[ParameterInfo], tied: list[tuple[str, ...]]
) -> list[ParameterInfo]:
    """Return the parameters, tied ones under their first name only, as ``named_parameters``."""
    further_names: set[str] = set()
    for group in tied:
        further_names.update(group[1:])
    return [info for info in parameters if info.name not in further_names]


def _contains_known(module: Module, known: Mapping[int, UnwrappedInfo]) -> bool:
    """Tell whether the module, or one inside it, was read before it was wrapped."""
    return any(id(part) in known for part in module.modules())


def _read_part(part: Module, known: Mapping[int, UnwrappedInfo]) -> UnwrappedInfo:
    """Return what was or can be read of a part of a model, see ``_parts``."""
    if id(part) in known:
        return known[id(part)]
    if _contains_known(part, known):
        return _read_without_children(part)
    return read_unwrapped(part)


def _parts(
    module: Module, name: str, known: Mapping[int, UnwrappedInfo]
) -> Iterator[tuple[str, Module]]:
    """Divide a model into parts; yield each with its name in the unwrapped model.

    A part is one of these:
    - a module that was read before it was wrapped, with all of its children;
    - a module that contains none of those, with all of its children;
    - a module that contains some of those: only its own parameters and buffers, for its children
      are parts themselves.
    """
    # The module inside DDP, FSDP, torch.compile or activation checkpointing, if any wraps it.
    module = unwrapped(module)
    yield name, module
    if id(module) not in known and _contains_known(module, known):
        for child_name, child in module.named_children():
            yield from _parts(child, join(name, child_name), known)


def _read_without_children(module: Module) -> UnwrappedInfo:
    """Return the parameters and buffers of the module itself, without those of its children."""
    parameters: list[ParameterInfo] = []
    for name, parameter in module.named_parameters(recurse=False):
        parameters.append(parameter_info(name, parameter))
    not_saved = _not_saved(module)
    buffers: list[ParameterInfo] = []
    for name, buffer in module.named_buffers(recurse=False):
        buffers.append(parameter_info(name, buffer, persistent=name not in not_saved))
    state_dict: list[str] = []
    for info in (*parameters, *buffers):
        if info.name not in not_saved:
            state_dict.append(info.name)
    return UnwrappedInfo(tuple(parameters), tuple(buffers), tuple(state_dict))


def _not_saved(module: Module) -> Collection[str]:
    """Return the names of the module's own buffers that its state dict leaves out."""
    # ``state_dict()`` is no alternative, because wrapped children may gather theirs in a
    # collective. The attribute is private; ``tests/launch/test_private_names.py`` fails when it
    # changes.
    return module._non_persistent_buffers_set  # noqa: SLF001 - see above


def _partitioned(model: Module, unwrapped: UnwrappedInfo) -> UnwrappedInfo:
    """Return ``unwrapped`` with the full shapes of what ``deepspeed.zero.Init`` has sharded.

    ``deepspeed.zero.Init`` is a context in which each parameter is sharded as soon as it is made;
    what remains of it is an empty tensor. Such parameters have no digest, because each rank has
    only a shard of their values.
    """
    live_parameters: dict[str, Any] = dict(model.named_parameters())
    parameters: list[ParameterInfo] = []
    for info in unwrapped.parameters:
        live = live_parameters.get(info.name)
        if live is not None and hasattr(live, "ds_shape"):
            shape = tuple(live.ds_shape)
            dtype = dtype_name(live.dtype)
            numel = int(live.ds_numel)
            partitioned = replace(info, shape=shape, local_numel=numel, dtype=dtype, digest="")
            parameters.append(partitioned)
        else:
            parameters.append(info)
    return replace(unwrapped, parameters=tuple(parameters))
