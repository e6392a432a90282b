"""Reads what a trainer saved: which keys stand in which file, in each library's own format."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pytest_distcompat.trace import FileFact


def read_files(directory: Path, prefix: str = "") -> tuple[FileFact, ...]:
    """Every file below the directory that holds keys of a model or of an optimizer; call it when all ranks are done.

    ``prefix`` is put before the paths in what is returned.
    """
    facts: list[FileFact] = []
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = prefix + str(path.relative_to(directory))
        if path.suffix == ".safetensors":
            shapes, dtypes = _safetensors(path)
            facts.append(FileFact(name, "safetensors", "model", tuple(shapes), shapes, dtypes))
        elif path.name == ".metadata":
            facts.extend(_dcp(path.parent, prefix + str(path.parent.relative_to(directory))))
        elif path.suffix in {".pt", ".bin"}:
            facts.extend(_pickled(path, name))
    return tuple(facts)


#: safetensors' names of dtypes to torch's: https://huggingface.co/docs/safetensors/index#format.
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def _safetensors(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        dtypes = {key: _DTYPES.get(part.get_dtype(), part.get_dtype()) for key, part in parts.items()}
        return {key: tuple(part.get_shape()) for key, part in parts.items()}, dtypes


def _dcp(directory: Path, name: str) -> Iterator[FileFact]:
    """A torch.distributed.checkpoint: its keys are in the metadata, prefixed by what the trainer called the parts."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    keys = sorted(stored)
    model = tuple(key.removeprefix("model.") for key in keys if key.startswith("model."))
    sizes = {name: getattr(stored[f"model.{name}"], "size", ()) for name in model}
    optimizer = tuple(_owner(key) for key in keys if key.startswith(("optimizer.state.", "optim.state.")))
    if model:
        yield FileFact(name, "dcp", "model", model, {key: tuple(size) for key, size in sizes.items() if size})
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
    deepspeed = isinstance(data.get("param_shapes"), list)
    if deepspeed:
        trained = {str(key): tuple(shape) for group in data["param_shapes"] for key, shape in group.items()}
        frozen = {str(key): tuple(shape) for key, shape in (data.get("frozen_param_shapes") or {}).items()}
        for what, shapes in (("param_shapes", trained), ("frozen_param_shapes", frozen)):
            if shapes:
                yield FileFact(f"{name}:{what}", "deepspeed", "model", tuple(shapes), shapes)
    for part, holds in (("module", "model"), ("model", "model")):
        if isinstance(data.get(part), Mapping):
            form = "deepspeed" if part == "module" else "torch"
            tensors = _shapes(data[part])
            if deepspeed:
                # ZeRO-3 leaves empty tensors here for what it partitioned: those parameters stand elsewhere.
                tensors = {key: shape for key, shape in tensors.items() if shape != (0,)}
            if tensors:
                yield FileFact(f"{name}:{part}", form, holds, tuple(tensors), tensors)
    nested = data.get("optimizer")
    state = data if isinstance(data.get("state"), Mapping) else nested if isinstance(nested, Mapping) else {}
    names = [key for key in state.get("state", {}) if isinstance(key, str)]
    if names:
        yield FileFact(name, "torch", "optimizer", tuple(names))
    if data and all(isinstance(value, torch.Tensor) for value in data.values()):
        yield FileFact(name, "torch", "model", tuple(str(key) for key in data), _shapes(data))


def _shapes(state: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Those of the tensors in a state dict, sharded ones as a whole."""
    return {str(key): tuple(value.size()) for key, value in state.items() if isinstance(value, torch.Tensor)}


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
