"""Reader of saved files: the keys in each file, or its values, in each library's own format."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_distcompat.probe.tensors import digest
from pytest_distcompat.trace import FileInfo


@dataclass(frozen=True)
class SavedFile:
    """A file that a trainer saved.

    Attributes:
        path: A path that torch and safetensors can open.
        name: The path from the checkpoint's directory on, as messages have it.
        key_prefix: What comes before the file's keys in the whole model's state dict: ``2.`` in the
            module directory ``2_Dense`` of a composite model, else empty.
    """

    path: Path
    name: str
    key_prefix: str


def read_files(directory: Path, prefix: str = "") -> tuple[FileInfo, ...]:
    """Return every file below the directory that holds keys of a model or an optimizer, as ``prefix`` and path.

    Call it when all ranks have finished writing. The keys of a composite model begin with the name
    of their module.
    """
    infos: list[FileInfo] = []
    for file in _files(directory):
        stored = _infos(file.path, prefix, file.name)
        infos.extend(_with_key_prefix(info, file.key_prefix) for info in stored)
    return tuple(infos)


def _with_key_prefix(info: FileInfo, key_prefix: str) -> FileInfo:
    """Return the file's description with ``key_prefix`` before each key; an optimizer's keys are not a module's."""
    if not key_prefix or info.holds == "optimizer":
        return info
    return info.renamed(lambda key: key_prefix + key)


def read_saved(directory: Path) -> tuple[FileInfo, ...]:
    """Return every file below the directory that holds a model, with digests of its values, an optimizer or a scheduler.

    Call it when all ranks have finished writing. It reads all tensors of the model, which is too
    slow for every cell.
    """
    infos: list[FileInfo] = []
    for file in _files(directory):
        for holds, content in _values(file.path):
            if not content:
                continue
            if holds == "model":
                digests = {
                    f"{file.key_prefix}{key}": digest(value) for key, value in content.items()
                }
                infos.append(FileInfo(file.name, "", holds, tuple(digests), digests=digests))
            else:
                keys = dict.fromkeys(str(key) for key in content)
                infos.append(FileInfo(file.name, "", holds, tuple(keys), digests={}))
    return tuple(infos)


def _files(directory: Path) -> Iterator[SavedFile]:
    """Yield each file below the directory, sorted by path."""
    with readable(directory) as root:
        paths = [path for path in root.rglob("*") if path.is_file()]
        for path in sorted(paths):
            name = path.relative_to(root)
            yield SavedFile(path, str(name), module_prefix(directory / name.parent))


def _infos(path: Path, prefix: str, relative: str) -> Iterator[FileInfo]:
    """Yield what one file holds, under the keys that stand in it."""
    name = prefix + relative
    if path.suffix == ".safetensors":
        shapes, dtypes = _safetensors(path)
        yield FileInfo(name, "safetensors", "model", tuple(shapes), shapes, dtypes)
    elif path.name.endswith(INDEX):
        # What is no index is another file of that name, and no business of ours.
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            yield _index(path, name)
    elif path.name == ".metadata":
        yield from _dcp(path.parent, prefix + str(Path(relative).parent))
    elif path.suffix in PICKLED:
        yield from _pickled(_load(path), name)


def _index(path: Path, name: str) -> FileInfo:
    """Return the index of sharded weights: the file of each key, and the size of all in bytes."""
    index = json.loads(path.read_text(encoding="utf-8"))
    file_by_key = dict(index["weight_map"].items())
    metadata = index.get("metadata") or {}
    return FileInfo(
        name,
        "index",
        "index",
        tuple(file_by_key),
        files=file_by_key,
        total_size=metadata.get("total_size"),
    )


def _values(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of a file: ``model`` with its tensors, ``optimizer`` and ``scheduler`` with their entries."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        yield "model", load_file(path)
    elif path.name == ".metadata":
        yield from _dcp_values(path.parent)
    elif path.suffix in PICKLED:
        data = _load(path)
        if isinstance(data, Mapping):
            yield from _pickled_values(data)


def _pickled_values(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of a file of ``torch.save``: one state dict, or several by name."""
    if "param_groups" in data and "state" in data:
        yield "optimizer", data
    elif "last_epoch" in data:
        yield "scheduler", data
    elif _is_state_dict(data):
        yield "model", data
    else:
        for part, names in _PARTS.items():
            for name in names:
                if isinstance(data.get(name), Mapping):
                    yield part, data[name]


def _is_state_dict(data: Mapping[Any, Any]) -> bool:
    """Tell whether it has tensors, and nothing else."""
    return bool(data) and all(isinstance(value, torch.Tensor) for value in data.values())


def module_directories(directory: Path) -> dict[str, str]:
    """Map the name of each module directory of a composite model to its module's name; empty for another directory."""
    # sentence-transformers writes each module of its Sequential into a directory of its own, the
    # first one (its name is empty) into the model's, and lists them in modules.json:
    # https://sbert.net/docs/sentence_transformer/usage/custom_models.html.
    try:
        modules = json.loads((directory / "modules.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(modules, list):
        return {}
    name_by_directory: dict[str, str] = {}
    for entry in modules:
        if isinstance(entry, dict) and "path" in entry and "name" in entry:
            name_by_directory[str(entry["path"])] = str(entry["name"])
    return {path: name for path, name in name_by_directory.items() if _is_own_or_child(path)}


def _is_own_or_child(path: str) -> bool:
    """Tell whether a module's path is that of the model itself (empty), or of a directory directly inside."""
    return not path or (Path(path).name == path and path != "..")


def module_prefix(directory: Path) -> str:
    """Return what comes before the keys of files in a composite model's module directory: ``2.`` for ``2_Dense``."""
    # The directory is the model's own, where its first module is, or that of another module of the
    # model above.
    name = module_directories(directory).get("")
    if name is None:
        name = module_directories(directory.parent).get(directory.name)
    return "" if name is None else f"{name}."


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


#: How the names of indices of sharded weights end:
#: https://huggingface.co/docs/transformers/big_models#sharded-checkpoints.
INDEX = (".safetensors.index.json", ".bin.index.json")
#: Suffixes of the files that ``torch.save`` writes.
PICKLED = frozenset({".pt", ".pth", ".bin", ".ckpt", ".tar"})
#: Names of the parts of a checkpoint in DeepSpeed, accelerate, torch's tutorials and Lightning.
MODEL = ("module", "model", "model_state_dict", "state_dict", "model_state")
OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state")
SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")
_PARTS = {"model": MODEL, "optimizer": OPTIMIZER, "scheduler": SCHEDULER}


#: The dtype names of safetensors and torch's name for each:
#: https://huggingface.co/docs/safetensors/index#format.
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
    """Return the shape and the dtype of each tensor in a safetensors file, by key."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            tensor = file.get_slice(key)
            dtype = tensor.get_dtype()
            shapes[key] = tuple(tensor.get_shape())
            dtypes[key] = _DTYPES.get(dtype, dtype)
    return shapes, dtypes


def _dcp(directory: Path, name: str) -> Iterator[FileInfo]:
    """Yield the model and the optimizer of a torch.distributed.checkpoint: their keys are in its metadata."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(directory).read_metadata()
    sizes: dict[str, tuple[int, ...]] = {}
    # An ordered set: the names of parameters that have an optimizer state.
    with_state: dict[str, None] = {}
    for key, (part, inner) in dcp_parts(metadata).items():
        if part == "model":
            sizes[inner] = tuple(getattr(metadata.state_dict_metadata[key], "size", ()))
        elif part == "optimizer" and inner.startswith("state."):
            # ``state.layers.0.weight.exp_avg`` -> ``layers.0.weight``
            parameter, _, _ = inner.removeprefix("state.").rpartition(".")
            with_state[parameter] = None
    if sizes:
        yield FileInfo(
            name, "dcp", "model", tuple(sizes), {key: size for key, size in sizes.items() if size}
        )
    if with_state:
        yield FileInfo(name, "dcp", "optimizer", tuple(with_state))


def _dcp_values(directory: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of a torch.distributed.checkpoint, read without the other ranks."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = FileSystemReader(directory).read_metadata()
    stored = metadata.state_dict_metadata
    parts = dcp_parts(metadata)
    tensors: dict[str, torch.Tensor] = {}
    for key, entry in stored.items():
        part, _ = parts[key]
        if part == "model" and isinstance(entry, TensorStorageMetadata):
            tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load(tensors, checkpoint_id=directory, no_dist=True)
    model: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        _, inner = parts[key]
        model[inner] = tensor
    yield "model", model
    for wanted in ("optimizer", "scheduler"):
        yield wanted, {key: entry for key, entry in stored.items() if parts[key][0] == wanted}


def dcp_parts(metadata: Any) -> dict[str, tuple[str, str]]:
    """Map each key to its part (``model``, ``optimizer``, ``scheduler`` or empty) and its name there.

    The planner records the path of each key in the nested state dict: ``("app", "model",
    "layers.0.weight")`` in torch's recipe
    (https://docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html). Otherwise the
    segment before the first dot is tried. If no key belongs to a model, top-level tensors are a
    model's own state dict; torchtitan saves it like this, beside ``optimizer``.
    """
    planned = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    stored = metadata.state_dict_metadata
    parts: dict[str, tuple[str, str]] = {}
    top_level_tensors: list[str] = []
    has_model = False
    for key in sorted(stored):
        segments = planned.get(key) or key.split(".", 1)
        path = [str(segment) for segment in segments]
        part = _part_of(path)
        parts[key] = part or ("", key)
        if len(path) == 1 and hasattr(stored[key], "size"):
            top_level_tensors.append(key)
        if part is not None and part[0] == "model":
            has_model = True
    if not has_model:
        for key in top_level_tensors:
            parts[key] = ("model", key)
    return parts


def _part_of(path: list[str]) -> tuple[str, str] | None:
    """Return the part that the path leads into and the rest of the path; None if no segment names a part."""
    for depth, segment in enumerate(path[:-1]):
        for part, names in _PARTS.items():
            if segment in names:
                return part, ".".join(path[depth + 1 :])
    return None


def _pickled(data: Any, name: str) -> Iterator[FileInfo]:
    """Yield the parts of a torch.save file: DeepSpeed's model states, a full state dict, an optimizer's."""
    if not isinstance(data, Mapping):
        return
    is_deepspeed = isinstance(data.get("param_shapes"), list)
    if is_deepspeed:
        yield from _deepspeed_shapes(data, name)
    for part in MODEL:
        if isinstance(data.get(part), Mapping):
            form = "deepspeed" if part == "module" else "torch"
            shapes = _uncut(data, _shapes(data[part]))
            if is_deepspeed:
                # ZeRO-3 writes empty tensors here for the parameters that it partitioned: their
                # values are elsewhere.
                shapes = {key: shape for key, shape in shapes.items() if shape != (0,)}
            if shapes:
                yield FileInfo(f"{name}:{part}", form, "model", tuple(shapes), shapes)
    state = _optimizer_state(data)
    parameters = [key for key in state.get("state", {}) if isinstance(key, str)]
    if parameters:
        yield FileInfo(name, "torch", "optimizer", tuple(parameters))
    if _is_state_dict(data):
        shapes = _shapes(_of_average(data))
        yield FileInfo(name, "torch", "model", tuple(shapes), shapes)


def _deepspeed_shapes(data: Mapping[str, Any], name: str) -> Iterator[FileInfo]:
    """Yield the shapes of the trained and of the frozen parameters, which DeepSpeed's file of model states lists."""
    trained: dict[str, tuple[int, ...]] = {}
    for group in data["param_shapes"]:
        for key, shape in group.items():
            trained[str(key)] = tuple(shape)
    frozen_shapes = data.get("frozen_param_shapes") or {}
    frozen = {str(key): tuple(shape) for key, shape in frozen_shapes.items()}
    if trained:
        yield FileInfo(
            f"{name}:param_shapes", "deepspeed", "model", tuple(trained), _uncut(data, trained)
        )
    if frozen:
        yield FileInfo(
            f"{name}:frozen_param_shapes", "deepspeed", "model", tuple(frozen), _uncut(data, frozen)
        )


def _optimizer_state(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the optimizer's state dict: the file itself, or its part of that name; empty if there is none."""
    if isinstance(data.get("state"), Mapping):
        return data
    for part in OPTIMIZER:
        if part in data:
            state = data[part]
            return state if isinstance(state, Mapping) else {}
    return {}


def _of_average(state: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the state dict of the averaged model, if it is that of ``torch.optim.swa_utils.AveragedModel``; else itself."""
    # It has the model as ``module`` and counts in ``n_averaged``, a buffer:
    # https://docs.pytorch.org/docs/stable/generated/torch.optim.swa_utils.AveragedModel.html
    inner = {
        key.removeprefix("module."): value
        for key, value in state.items()
        if str(key).startswith("module.")
    }
    if "n_averaged" in state and len(inner) == len(state) - 1:
        return inner
    return state


def _shapes(state: Mapping[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a state dict; of sharded tensors the global shape."""
    return {
        str(key): tuple(value.size())
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _uncut(
    data: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes with the full one for each tensor of which a rank of DeepSpeed's AutoTP has saved its shard."""
    # The file itself says so, for its conversion
    # (https://github.com/deepspeedai/DeepSpeed/pull/7908): a pattern of names, the shapes of the
    # ranks' shards, and the full shape.
    full_shapes = dict(shapes)
    info = data.get("universal_checkpoint_info") or {}
    sharded = info.get("affine_map", {}).get("params", {})
    for pattern, entry in sharded.items():
        shard_shapes = [tuple(shard["shard_shape"]) for shard in entry["ranks"].values()]
        logical_shape = tuple(entry["logical_shape"])
        for key, shape in shapes.items():
            if shape in shard_shapes and re.fullmatch(pattern, key):
                full_shapes[key] = logical_shape
    return full_shapes


def _load(path: Path) -> Any:
    """Return the file's content with its tensors memory-mapped; None if torch cannot load it."""
    # The trainer under test has just written the file, so unpickling it adds no danger.
    for mmap in (True, False):
        with contextlib.suppress(RuntimeError, pickle.UnpicklingError, EOFError):
            return torch.load(path, map_location="cpu", mmap=mmap, weights_only=False)
    return None
