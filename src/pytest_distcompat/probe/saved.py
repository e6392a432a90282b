"""Reader of the values in a checkpoint that should hold only the model, and of whatever else it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_distcompat.probe.files import (
    MODEL,
    OPTIMIZER,
    PICKLED,
    SCHEDULER,
    _load,
    dcp_parts,
    module_prefix,
    readable,
)
from pytest_distcompat.probe.tensors import digest
from pytest_distcompat.trace import FileInfo


def read_saved(directory: Path) -> tuple[FileInfo, ...]:
    """Return every file below the directory that holds a model, an optimizer or a scheduler.

    Call it when all ranks have finished writing. It reads all tensors of the model, which is too slow for every cell.
    """
    infos = []
    with readable(directory) as root:
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            module = module_prefix(directory / path.relative_to(root).parent)
            for holds, content in _parts(path):
                named = {f"{module if holds == 'model' else ''}{key}": value for key, value in content.items()}
                digests = {key: digest(value) for key, value in named.items()} if holds == "model" else {}
                if named:
                    infos.append(FileInfo(str(path.relative_to(root)), "", holds, tuple(named), digests=digests))
    return tuple(infos)


def _parts(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of a file: ``model`` with its tensors, ``optimizer`` and ``scheduler`` with their entries."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        yield "model", load_file(path)
    elif path.name == ".metadata":
        yield from _dcp(path.parent)
    elif path.suffix in PICKLED:
        data = _load(path)
        if isinstance(data, Mapping):
            yield from _pickled(data)


def _dcp(directory: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of a torch.distributed.checkpoint, read without the other ranks."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = FileSystemReader(directory).read_metadata()
    stored = metadata.state_dict_metadata
    parts = dcp_parts(metadata)
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if parts[key][0] == "model" and isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, checkpoint_id=directory, no_dist=True)
    yield "model", {parts[key][1]: tensor for key, tensor in tensors.items()}
    for part in ("optimizer", "scheduler"):
        yield part, {key: entry for key, entry in stored.items() if parts[key][0] == part}


def _pickled(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of a torch.save file: a state dict, an optimizer's, a scheduler's, or several by name."""
    import torch

    if "param_groups" in data and "state" in data:
        yield "optimizer", data
    elif "last_epoch" in data:
        yield "scheduler", data
    elif data and all(isinstance(value, torch.Tensor) for value in data.values()):
        yield "model", data
    else:
        for part, names in (("model", MODEL), ("optimizer", OPTIMIZER), ("scheduler", SCHEDULER)):
            for name in names:
                if isinstance(data.get(name), Mapping):
                    yield part, data[name]
