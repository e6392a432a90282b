"""Reads what a trainer saved: which keys stand in which file, in each library's own format."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pytest_distcompat.trace import FileFact


def read_files(directory: Path) -> tuple[FileFact, ...]:
    """Every file below the directory that holds keys of a model or of an optimizer; call it when all ranks are done."""
    facts: list[FileFact] = []
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = str(path.relative_to(directory))
        if path.suffix == ".safetensors":
            facts.append(FileFact(name, "safetensors", "model", tuple(_safetensors_keys(path))))
        elif path.name == ".metadata":
            facts.extend(_dcp(path.parent, str(path.parent.relative_to(directory))))
        elif path.suffix in {".pt", ".bin"}:
            facts.extend(_pickled(path, name))
    return tuple(facts)


def _safetensors_keys(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _dcp(directory: Path, name: str) -> Iterator[FileFact]:
    """A torch.distributed.checkpoint: its keys are in the metadata, prefixed by what the trainer called the parts."""
    from torch.distributed.checkpoint import FileSystemReader

    keys = sorted(FileSystemReader(directory).read_metadata().state_dict_metadata)
    model = tuple(key.removeprefix("model.") for key in keys if key.startswith("model."))
    optimizer = tuple(_owner(key) for key in keys if key.startswith(("optimizer.state.", "optim.state.")))
    if model:
        yield FileFact(name, "dcp", "model", model)
    if optimizer:
        yield FileFact(name, "dcp", "optimizer", tuple(dict.fromkeys(optimizer)))


def _owner(key: str) -> str:
    """``optimizer.state.layers.0.weight.exp_avg`` -> ``layers.0.weight``."""
    return key.split(".state.", 1)[1].rpartition(".")[0]


def _pickled(path: Path, name: str) -> Iterator[FileFact]:
    """A torch.save file: DeepSpeed's model states, a full state dict, an optimizer's."""
    data = _load(path)
    if not isinstance(data, Mapping):
        return
    if isinstance(data.get("param_shapes"), list):
        shapes = tuple(key for group in data["param_shapes"] for key in group)
        yield FileFact(f"{name}:param_shapes", "deepspeed", "model", shapes)
    for part, holds in (("module", "model"), ("model", "model")):
        if isinstance(data.get(part), Mapping):
            form = "deepspeed" if part == "module" else "torch"
            keys = tuple(str(key) for key, value in data[part].items() if isinstance(value, torch.Tensor))
            # ZeRO-3 keeps only what it did not partition here, often nothing.
            if keys:
                yield FileFact(f"{name}:{part}", form, holds, keys)
    nested = data.get("optimizer")
    state = data if isinstance(data.get("state"), Mapping) else nested if isinstance(nested, Mapping) else {}
    names = [key for key in state.get("state", {}) if isinstance(key, str)]
    if names:
        yield FileFact(name, "torch", "optimizer", tuple(names))
    if data and all(isinstance(value, torch.Tensor) for value in data.values()):
        yield FileFact(name, "torch", "model", tuple(str(key) for key in data))


def _load(path: Path) -> Any:
    """The file's content with its tensors mapped, not read; None for a pickle of something else.

    The file was written a moment ago by the trainer under test, so trusting its pickles adds no danger.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except (RuntimeError, pickle.UnpicklingError, EOFError):
        try:
            return torch.load(path, map_location="cpu", weights_only=False)
        except (RuntimeError, pickle.UnpicklingError, EOFError):
            return None
