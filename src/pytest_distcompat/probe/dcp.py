"""Reader of a torch.distributed.checkpoint (DCP), without the other ranks.

Such a checkpoint is a directory: ``.distcp`` files with values, and a file ``.metadata``, which
lists all keys with their shapes. ``files`` calls ``read_dcp`` for the keys of model and optimizer,
and ``dcp_values`` for values.

Keys are flat, ``app.model.layers.0.weight``. The metadata may also have the path that led to each
in the nested state dict, ``("app", "model", "layers.0.weight")``, as its planner recorded it (the
planner is the part of DCP that decides which rank writes what).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pytest_distcompat.probe.checkpoint_parts import PARTS, Part, Shapes
from pytest_distcompat.trace import FileInfo


def read_dcp(directory: Path, name: str) -> Iterator[FileInfo]:
    """Yield the records of model and optimizer of a checkpoint, read from its metadata alone.

    Args:
        directory: The directory of the checkpoint.
        name: Its path as records have it.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(directory).read_metadata()
    stored = metadata.state_dict_metadata
    # Of the model; empty for an entry that is no tensor.
    sizes: Shapes = {}
    # An ordered set: the names of parameters that have an optimizer state.
    with_state: dict[str, None] = {}
    for key, (part, inner) in dcp_parts(metadata).items():
        if part == "model":
            sizes[inner] = tuple(getattr(stored[key], "size", ()))
        elif part == "optimizer" and inner.startswith("state."):
            # ``state.layers.0.weight.exp_avg`` -> ``layers.0.weight``
            parameter, _, _ = inner.removeprefix("state.").rpartition(".")
            with_state[parameter] = None
    if sizes:
        shapes = {key: size for key, size in sizes.items() if size}
        yield FileInfo(name, format="dcp", holds="model", keys=tuple(sizes), shapes=shapes)
    if with_state:
        yield FileInfo(name, format="dcp", holds="optimizer", keys=tuple(with_state))


def dcp_values(directory: Path) -> Iterator[Part]:
    """Yield the parts of a checkpoint with the values of the model, which are read.

    A part is ``("model", {"layers.0.weight": tensor, ...})``. Those of optimizer and scheduler have
    their full keys, and what the metadata says of each entry in place of its value.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = FileSystemReader(directory).read_metadata()
    stored = metadata.state_dict_metadata
    parts = dcp_parts(metadata)
    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, dict[str, Any]] = {"optimizer": {}, "scheduler": {}}
    for key, entry in stored.items():
        part, _ = parts[key]
        if part == "model" and isinstance(entry, TensorStorageMetadata):
            # ``load`` below fills it.
            tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        elif part in entries:
            entries[part][key] = entry
    load(tensors, checkpoint_id=directory, no_dist=True)
    model: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        _, inner = parts[key]
        model[inner] = tensor
    yield "model", model
    yield from entries.items()


def dcp_parts(metadata: Any) -> dict[str, tuple[str, str]]:
    """Map each key to its part of the checkpoint, and its name there.

    ``app.model.layers.0.weight`` is mapped to ``("model", "layers.0.weight")``. The part is
    ``model``, ``optimizer``, ``scheduler`` or, if that is unknown, empty.

    The planner records the path of each key in the nested state dict: ``("app", "model",
    "layers.0.weight")`` in torch's recipe
    (https://docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html). Otherwise the
    segment before the first dot is tried. If no key belongs to a model, top-level tensors are a
    model's own state dict; torchtitan saves it like this, beside ``optimizer``.
    """
    planned: Mapping[str, Any] = {}
    if isinstance(metadata.planner_data, dict):
        planned = metadata.planner_data
    stored = metadata.state_dict_metadata
    parts: dict[str, tuple[str, str]] = {}
    top_level_tensors: list[str] = []
    for key in sorted(stored):
        segments = planned.get(key) or key.split(".", 1)
        path = [str(segment) for segment in segments]
        parts[key] = _part_of(path) or ("", key)
        if len(path) == 1 and hasattr(stored[key], "size"):
            top_level_tensors.append(key)
    has_model = any(part == "model" for part, _ in parts.values())
    if not has_model:
        for key in top_level_tensors:
            parts[key] = ("model", key)
    return parts


def _part_of(path: list[str]) -> tuple[str, str] | None:
    """Return the part that the path leads into, and the rest of the path.

    Of ``["app", "model", "layers.0.weight"]`` it is ``("model", "layers.0.weight")``; None if no
    segment names a part.
    """
    for depth, segment in enumerate(path[:-1]):
        for part, names in PARTS.items():
            if segment in names:
                return part, ".".join(path[depth + 1 :])
    return None
