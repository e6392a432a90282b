"""Reads the values in a checkpoint that is to hold the model alone, and what else stands in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_distcompat.probe.files import MODEL, OPTIMIZER, PICKLED, SCHEDULER, _load, dcp_parts, readable
from pytest_distcompat.probe.tensors import digest
from pytest_distcompat.trace import FileInfo


def read_saved(directory: Path) -> tuple[FileInfo, ...]:
    """Every file below the directory that holds a model, an optimizer or a scheduler; call it when all ranks are done.

    It reads all tensors of the model, so not for every cell.
    """
    infos = []
    with readable(directory) as there:
        for path in sorted(path for path in there.rglob("*") if path.is_file()):
            for holds, content in _parts(path):
                digests = {str(key): digest(value) for key, value in content.items()} if holds == "model" else {}
                if content:
                    keys = tuple(map(str, content))
                    infos.append(FileInfo(str(path.relative_to(there)), "", holds, keys, digests=digests))
    return tuple(infos)


def _parts(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """``model`` with its tensors, ``optimizer`` and ``scheduler`` with whatever they hold."""
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
    """A torch.distributed.checkpoint, read without the other ranks."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = FileSystemReader(directory).read_metadata()
    stored = metadata.state_dict_metadata
    parts = dcp_parts(metadata)
    tensors = {
        key: torch.empty(kept.size, dtype=kept.properties.dtype)
        for key, kept in stored.items()
        if parts[key][0] == "model" and isinstance(kept, TensorStorageMetadata)
    }
    load(tensors, checkpoint_id=directory, no_dist=True)
    yield "model", {parts[key][1]: tensor for key, tensor in tensors.items()}
    for part in ("optimizer", "scheduler"):
        yield part, {key: kept for key, kept in stored.items() if parts[key][0] == part}


def _pickled(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A torch.save file: a state dict by itself, an optimizer's, a scheduler's, or several under names."""
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
