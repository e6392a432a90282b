"""Reads what a trainer saved: which keys stand in which file, in each library's own format."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pytest_distcompat.trace import FileInfo


def read_files(directory: Path, prefix: str = "") -> tuple[FileInfo, ...]:
    """Every file below the directory that holds keys of a model or of an optimizer; call it when all ranks are done.

    ``prefix`` is put before the paths in what is returned.
    """
    infos: list[FileInfo] = []
    with readable(directory) as there:
        for path in sorted(path for path in there.rglob("*") if path.is_file()):
            name = prefix + str(path.relative_to(there))
            if path.suffix == ".safetensors":
                shapes, dtypes = _safetensors(path)
                infos.append(FileInfo(name, "safetensors", "model", tuple(shapes), shapes, dtypes))
            elif path.name == ".metadata":
                infos.extend(_dcp(path.parent, prefix + str(path.parent.relative_to(there))))
            elif path.suffix in PICKLED:
                infos.extend(_pickled(path, name))
    return tuple(infos)


@contextlib.contextmanager
def readable(directory: Path) -> Iterator[Path]:
    """Give a path of the directory that torch and safetensors can open: they take UTF-8 only. It need not be there."""
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        try:
            descriptor = os.open(directory, os.O_RDONLY)
        except FileNotFoundError:
            # A trainer that saves nothing makes no directory.
            yield directory
            return
        try:
            yield Path(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
    else:
        yield directory


#: Files that ``torch.save`` wrote.
PICKLED = frozenset({".pt", ".pth", ".bin", ".ckpt", ".tar"})
#: What trainers call the parts of a checkpoint: DeepSpeed, accelerate, torch's tutorials, Lightning.
MODEL = ("module", "model", "model_state_dict", "state_dict", "model_state")
OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state")
SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")


#: safetensors' names of dtypes to torch's: https://huggingface.co/docs/safetensors/index#format.
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def _safetensors(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        dtypes = {key: _DTYPES.get(part.get_dtype(), part.get_dtype()) for key, part in parts.items()}
        return {key: tuple(part.get_shape()) for key, part in parts.items()}, dtypes


def _dcp(directory: Path, name: str) -> Iterator[FileInfo]:
    """A torch.distributed.checkpoint: its keys are in the metadata."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(directory).read_metadata()
    parts = dcp_parts(metadata)
    stored = {inner: metadata.state_dict_metadata[key] for key, (part, inner) in parts.items() if part == "model"}
    sizes = {inner: tuple(getattr(kept, "size", ())) for inner, kept in stored.items()}
    # ``state.layers.0.weight.exp_avg`` -> ``layers.0.weight``
    states = [inner for part, inner in parts.values() if part == "optimizer" and inner.startswith("state.")]
    optimizer = tuple(dict.fromkeys(inner.removeprefix("state.").rpartition(".")[0] for inner in states))
    if sizes:
        yield FileInfo(name, "dcp", "model", tuple(sizes), {key: size for key, size in sizes.items() if size})
    if optimizer:
        yield FileInfo(name, "dcp", "optimizer", optimizer)


def dcp_parts(metadata: Any) -> dict[str, tuple[str, str]]:
    """Key to the part of a training that it is of (``model``, ``optimizer``, ``scheduler``, or none), and its name there.

    The planner writes down where in the nested state dict each stood: ``("app", "model", "layers.0.weight")``, as torch's
    recipe has it (https://docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html). What another planner wrote is
    told by its beginning. Where nothing is called a part, what stands by itself is a model's own state dict.
    """
    planned = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    paths = {
        key: [str(one) for one in planned.get(key) or key.split(".", 1)] for key in sorted(metadata.state_dict_metadata)
    }
    found = {key: _part_of(path) or ("", key) for key, path in paths.items()}
    if not any(part for part, _ in found.values()):
        alone = {key for key in found if len(paths[key]) == 1 and hasattr(metadata.state_dict_metadata[key], "size")}
        found |= {key: ("model", key) for key in alone}
    return found


def _part_of(path: list[str]) -> tuple[str, str] | None:
    for place, segment in enumerate(path[:-1]):
        for part, names in (("model", MODEL), ("optimizer", OPTIMIZER), ("scheduler", SCHEDULER)):
            if segment in names:
                return part, ".".join(path[place + 1 :])
    return None


def _pickled(path: Path, name: str) -> Iterator[FileInfo]:
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
                yield FileInfo(f"{name}:{what}", "deepspeed", "model", tuple(shapes), shapes)
    for part in MODEL:
        if isinstance(data.get(part), Mapping):
            form = "deepspeed" if part == "module" else "torch"
            tensors = _shapes(data[part])
            if deepspeed:
                # ZeRO-3 leaves empty tensors here for what it partitioned: those parameters stand elsewhere.
                tensors = {key: shape for key, shape in tensors.items() if shape != (0,)}
            if tensors:
                yield FileInfo(f"{name}:{part}", form, "model", tuple(tensors), tensors)
    nested = next((data[part] for part in OPTIMIZER if part in data), None)
    state = data if isinstance(data.get("state"), Mapping) else nested if isinstance(nested, Mapping) else {}
    names = [key for key in state.get("state", {}) if isinstance(key, str)]
    if names:
        yield FileInfo(name, "torch", "optimizer", tuple(names))
    if data and all(isinstance(value, torch.Tensor) for value in data.values()):
        yield FileInfo(name, "torch", "model", tuple(str(key) for key in data), _shapes(data))


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
