"""Reader of saved files: the keys in each file, or its values, in each library's own format."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pytest_distcompat.probe.tensors import digest
from pytest_distcompat.trace import FileInfo


def read_files(directory: Path, prefix: str = "") -> tuple[FileInfo, ...]:
    """Return every file below the directory that holds keys of a model or an optimizer, as ``prefix`` and path.

    Call it when all ranks have finished writing. The keys of a composite model begin with the name of their module.
    """
    return tuple(
        info.renamed(lambda key: module + key) if module and info.holds != "optimizer" else info  # noqa: B023 - called here
        for path, name, module in _files(directory)
        for info in _infos(path, prefix, name)
    )


def read_saved(directory: Path) -> tuple[FileInfo, ...]:
    """Return every file below the directory that holds a model, with digests of its values, an optimizer or a scheduler.

    Call it when all ranks have finished writing. It reads all tensors of the model, which is too slow for every cell.
    """
    infos = []
    for path, name, module in _files(directory):
        for holds, content in _values(path):
            named = {f"{module if holds == 'model' else ''}{key}": value for key, value in content.items()}
            digests = {key: digest(value) for key, value in named.items()} if holds == "model" else {}
            if named:
                infos.append(FileInfo(name, "", holds, tuple(named), digests=digests))
    return tuple(infos)


def _files(directory: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield each file below the directory: its path, that path from the directory on, and what comes before its keys."""
    with readable(directory) as root:
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            name = path.relative_to(root)
            yield path, str(name), module_prefix(directory / name.parent)


def _infos(path: Path, prefix: str, relative: str) -> Iterator[FileInfo]:
    """Yield what one file holds, under the keys that stand in it."""
    name = prefix + relative
    if path.suffix == ".safetensors":
        shapes, dtypes = _safetensors(path)
        yield FileInfo(name, "safetensors", "model", tuple(shapes), shapes, dtypes)
    elif path.name.endswith(INDEX):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            index = json.loads(path.read_text(encoding="utf-8"))
            files, size = index["weight_map"], (index.get("metadata") or {}).get("total_size")
            yield FileInfo(name, "index", "index", tuple(files), files=dict(files.items()), total_size=size)
    elif path.name == ".metadata":
        yield from _dcp(path.parent, prefix + str(Path(relative).parent))
    elif path.suffix in PICKLED:
        yield from _pickled(_load(path), name)


def _values(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of a file: ``model`` with its tensors, ``optimizer`` and ``scheduler`` with their entries."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        yield "model", load_file(path)
    elif path.name == ".metadata":
        yield from _dcp_values(path.parent)
    elif path.suffix in PICKLED and isinstance(data := _load(path), Mapping):
        # A state dict, an optimizer's, a scheduler's, or several by name.
        if "param_groups" in data and "state" in data:
            yield "optimizer", data
        elif "last_epoch" in data:
            yield "scheduler", data
        elif data and all(isinstance(value, torch.Tensor) for value in data.values()):
            yield "model", data
        else:
            names = ((part, name) for part, names in _PARTS.items() for name in names)
            yield from ((part, data[name]) for part, name in names if isinstance(data.get(name), Mapping))


def module_directories(directory: Path) -> dict[str, str]:
    """Map the name of each module directory of a composite model to its module's name; empty for another directory."""
    # sentence-transformers writes each module of its Sequential into a directory of its own, the first one (its name is empty)
    # into the model's, and lists them in modules.json: https://sbert.net/docs/sentence_transformer/usage/custom_models.html.
    try:
        listed = json.loads((directory / "modules.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    named = {str(entry.get("path")): str(entry.get("name")) for entry in entries if {"path", "name"} <= entry.keys()}
    return {path: name for path, name in named.items() if not path or (Path(path).name == path != "..")}


def module_prefix(directory: Path) -> str:
    """Return what comes before the keys of files in a composite model's module directory: ``2.`` for ``2_Dense``."""
    own, beside = module_directories(directory), module_directories(directory.parent)
    name = own.get("", beside.get(directory.name))
    return f"{name}." if name is not None else ""


@contextlib.contextmanager
def readable(directory: Path) -> Iterator[Path]:
    """Provide a path of the directory that torch and safetensors can open: they accept UTF-8 only. It need not exist."""
    with contextlib.ExitStack() as stack:
        try:
            str(directory).encode()
        except UnicodeEncodeError:
            # A trainer that saves nothing makes no directory.
            if directory.exists():
                descriptor = os.open(directory, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                directory = Path(f"/proc/self/fd/{descriptor}")
        yield directory


#: How the names of indices of sharded weights end: https://huggingface.co/docs/transformers/big_models#sharded-checkpoints.
INDEX = (".safetensors.index.json", ".bin.index.json")
#: Suffixes of the files that ``torch.save`` writes.
PICKLED = frozenset({".pt", ".pth", ".bin", ".ckpt", ".tar"})
#: Names of the parts of a checkpoint in DeepSpeed, accelerate, torch's tutorials and Lightning.
MODEL = ("module", "model", "model_state_dict", "state_dict", "model_state")
OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state")
SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")
_PARTS = {"model": MODEL, "optimizer": OPTIMIZER, "scheduler": SCHEDULER}


#: The dtype names of safetensors and torch's name for each: https://huggingface.co/docs/safetensors/index#format.
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def _safetensors(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        dtypes = {key: _DTYPES.get(part.get_dtype(), part.get_dtype()) for key, part in parts.items()}
        return {key: tuple(part.get_shape()) for key, part in parts.items()}, dtypes


def _dcp(directory: Path, name: str) -> Iterator[FileInfo]:
    """Yield the model and the optimizer of a torch.distributed.checkpoint: their keys are in its metadata."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(directory).read_metadata()
    parts = dcp_parts(metadata)
    stored = {inner: metadata.state_dict_metadata[key] for key, (part, inner) in parts.items() if part == "model"}
    sizes = {inner: tuple(getattr(entry, "size", ())) for inner, entry in stored.items()}
    # ``state.layers.0.weight.exp_avg`` -> ``layers.0.weight``
    states = [inner for part, inner in parts.values() if part == "optimizer" and inner.startswith("state.")]
    optimizer = tuple(dict.fromkeys(inner.removeprefix("state.").rpartition(".")[0] for inner in states))
    if sizes:
        yield FileInfo(name, "dcp", "model", tuple(sizes), {key: size for key, size in sizes.items() if size})
    if optimizer:
        yield FileInfo(name, "dcp", "optimizer", optimizer)


def _dcp_values(directory: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of a torch.distributed.checkpoint, read without the other ranks."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = FileSystemReader(directory).read_metadata()
    stored, parts = metadata.state_dict_metadata, dcp_parts(metadata)
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if parts[key][0] == "model" and isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, checkpoint_id=directory, no_dist=True)
    yield "model", {parts[key][1]: tensor for key, tensor in tensors.items()}
    for part in ("optimizer", "scheduler"):
        yield part, {key: entry for key, entry in stored.items() if parts[key][0] == part}


def dcp_parts(metadata: Any) -> dict[str, tuple[str, str]]:
    """Map each key to its part (``model``, ``optimizer``, ``scheduler`` or empty) and its name there.

    The planner records the path of each key in the nested state dict: ``("app", "model", "layers.0.weight")`` in
    torch's recipe (https://docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html). Otherwise the
    segment before the first dot is tried. If no key belongs to a model, top-level tensors are a model's own state dict;
    torchtitan saves it like this, beside ``optimizer``.
    """
    planned = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    paths = {
        key: [str(segment) for segment in planned.get(key) or key.split(".", 1)]
        for key in sorted(metadata.state_dict_metadata)
    }
    parts = {key: _part_of(path) or ("", key) for key, path in paths.items()}
    if not any(part == "model" for part, _ in parts.values()):
        stored = metadata.state_dict_metadata
        parts |= {key: ("model", key) for key in parts if len(paths[key]) == 1 and hasattr(stored[key], "size")}
    return parts


def _part_of(path: list[str]) -> tuple[str, str] | None:
    """Return the part that the path leads into and the rest of the path; None if no segment names a part."""
    found = ((part, depth) for depth, one in enumerate(path[:-1]) for part, names in _PARTS.items() if one in names)
    return next(((part, ".".join(path[depth + 1 :])) for part, depth in found), None)


def _pickled(data: Any, name: str) -> Iterator[FileInfo]:
    """Yield the parts of a torch.save file: DeepSpeed's model states, a full state dict, an optimizer's."""
    if not isinstance(data, Mapping):
        return
    deepspeed = isinstance(data.get("param_shapes"), list)
    if deepspeed:
        trained = {str(key): tuple(shape) for group in data["param_shapes"] for key, shape in group.items()}
        frozen = {str(key): tuple(shape) for key, shape in (data.get("frozen_param_shapes") or {}).items()}
        for entry, shapes in (("param_shapes", trained), ("frozen_param_shapes", frozen)):
            if shapes:
                yield FileInfo(f"{name}:{entry}", "deepspeed", "model", tuple(shapes), _uncut(data, shapes))
    for part in MODEL:
        if isinstance(data.get(part), Mapping):
            form = "deepspeed" if part == "module" else "torch"
            tensors = _uncut(data, _shapes(data[part]))
            if deepspeed:
                # ZeRO-3 writes empty tensors here for the parameters that it partitioned: their values are elsewhere.
                tensors = {key: shape for key, shape in tensors.items() if shape != (0,)}
            if tensors:
                yield FileInfo(f"{name}:{part}", form, "model", tuple(tensors), tensors)
    nested = next((data[part] for part in OPTIMIZER if part in data), None)
    state = data if isinstance(data.get("state"), Mapping) else nested if isinstance(nested, Mapping) else {}
    names = [key for key in state.get("state", {}) if isinstance(key, str)]
    if names:
        yield FileInfo(name, "torch", "optimizer", tuple(names))
    if data and all(isinstance(value, torch.Tensor) for value in data.values()):
        yield FileInfo(name, "torch", "model", tuple(shapes := _shapes(_of_average(data))), shapes)


def _of_average(state: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the state dict of the averaged model, if it is that of ``torch.optim.swa_utils.AveragedModel``; else itself."""
    # It has the model as ``module`` and counts in ``n_averaged``, a buffer:
    # https://docs.pytorch.org/docs/stable/generated/torch.optim.swa_utils.AveragedModel.html
    inner = {key.removeprefix("module."): value for key, value in state.items() if str(key).startswith("module.")}
    return inner if len(inner) == len(state) - 1 and "n_averaged" in state else state


def _shapes(state: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a state dict; of sharded tensors the global shape."""
    return {str(key): tuple(value.size()) for key, value in state.items() if isinstance(value, torch.Tensor)}


def _uncut(data: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of wholes for those of the parts that one rank of DeepSpeed's AutoTP has saved."""
    # What the file itself says, for its conversion (https://github.com/deepspeedai/DeepSpeed/pull/7908), of parts in that shape.
    found, info = dict(shapes), data.get("universal_checkpoint_info") or {}
    for pattern, entry in info.get("affine_map", {}).get("params", {}).items():
        parts = [tuple(one["shard_shape"]) for one in entry["ranks"].values()]
        whole = tuple(entry["logical_shape"])
        found |= {key: whole for key, shape in shapes.items() if shape in parts and re.fullmatch(pattern, key)}
    return found


def _load(path: Path) -> Any:
    """Return the file's content with its tensors memory-mapped; None if torch cannot load it."""
    # The trainer under test has just written the file, so unpickling it adds no danger.
    for mmap in (True, False):
        with contextlib.suppress(RuntimeError, pickle.UnpicklingError, EOFError):
            return torch.load(path, map_location="cpu", mmap=mmap, weights_only=False)
    return None
