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

#: The shape of each tensor, by key.
_Shapes = dict[str, tuple[int, ...]]
#: A part of a checkpoint (``model``, ``optimizer`` or ``scheduler``), and its entries by key.
_Part = tuple[str, Mapping[str, Any]]


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
    """Return what every file below the directory holds of a model or an optimizer: its keys.

    Call it when all ranks have finished writing. The keys of a composite model begin with the name
    of their module.

    Args:
        directory: The directory.
        prefix: What comes before the path of each file in its name.
    """
    infos: list[FileInfo] = []
    for file in _files(directory):
        for info in _infos(file.path, prefix, file.name):
            infos.append(_with_key_prefix(info, file.key_prefix))
    return tuple(infos)


def _with_key_prefix(info: FileInfo, key_prefix: str) -> FileInfo:
    """Return the file's description with ``key_prefix`` before each key."""
    # An optimizer's keys are not those of a module.
    if not key_prefix or info.holds == "optimizer":
        return info
    return info.renamed(lambda key: key_prefix + key)


def read_saved(directory: Path) -> tuple[FileInfo, ...]:
    """Return what every file below the directory holds of a training, with digests of its values.

    Those are files with a model, an optimizer or a scheduler; only a model's values have digests.
    Call it when all ranks have finished writing. It reads all tensors of the model, which is too
    slow for every cell.
    """
    infos: list[FileInfo] = []
    for file in _files(directory):
        for holds, content in _values(file.path):
            if content:
                infos.append(_with_digests(file, holds, content))
    return tuple(infos)


def _with_digests(file: SavedFile, holds: str, content: Mapping[str, Any]) -> FileInfo:
    """Return the description of one part of a file; of a model with a digest of each value."""
    if holds != "model":
        keys = dict.fromkeys(str(key) for key in content)
        return FileInfo(file.name, "", holds, tuple(keys), digests={})
    digests: dict[str, str] = {}
    for key, value in content.items():
        qualified_key = f"{file.key_prefix}{key}"
        digests[qualified_key] = digest(value)
    return FileInfo(file.name, "", holds, tuple(digests), digests=digests)


def _files(directory: Path) -> Iterator[SavedFile]:
    """Yield each file below the directory, sorted by path."""
    with readable(directory) as root:
        for path in sorted(root.rglob("*")):
            if not path.is_file():
                continue
            relative = path.relative_to(root)
            key_prefix = module_prefix(directory / relative.parent)
            yield SavedFile(path, str(relative), key_prefix)


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


def _values(path: Path) -> Iterator[_Part]:
    """Yield the parts of a file: a model has tensors, an optimizer and a scheduler any entries."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        yield "model", load_file(path)
    elif path.name == ".metadata":
        yield from _dcp_values(path.parent)
    elif path.suffix in PICKLED:
        data = _load(path)
        if isinstance(data, Mapping):
            yield from _pickled_values(data)


def _pickled_values(data: Mapping[str, Any]) -> Iterator[_Part]:
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
    if not data:
        return False
    return all(isinstance(value, torch.Tensor) for value in data.values())


def module_directories(directory: Path) -> dict[str, str]:
    """Map the name of each module directory of a composite model to its module's name.

    The result is empty for the directory of any other model.
    """
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
            path = str(entry["path"])
            if _is_own_or_child(path):
                name_by_directory[path] = str(entry["name"])
    return name_by_directory


def _is_own_or_child(path: str) -> bool:
    """Tell whether a module's path is that of the model (empty), or of a directory inside it."""
    if not path:
        return True
    return Path(path).name == path and path != ".."


def module_prefix(directory: Path) -> str:
    """Return what comes before the keys of the files in a directory: ``2.`` for ``2_Dense``.

    It is the name of the module that a composite model saves there; empty for any other model.
    """
    # The directory is the model's own, where its first module is, or that of another module of the
    # model above.
    name = module_directories(directory).get("")
    if name is None:
        name = module_directories(directory.parent).get(directory.name)
    if name is None:
        return ""
    return f"{name}."


@contextlib.contextmanager
def readable(directory: Path) -> Iterator[Path]:
    """Provide a path of the directory that torch and safetensors can open: only UTF-8 is accepted.

    The directory need not exist.
    """
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


def _safetensors(path: Path) -> tuple[_Shapes, dict[str, str]]:
    """Return the shape and the dtype of each tensor in a safetensors file, by key."""
    from safetensors import safe_open

    shapes: _Shapes = {}
    dtypes: dict[str, str] = {}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            tensor = file.get_slice(key)
            dtype = tensor.get_dtype()
            shapes[key] = tuple(tensor.get_shape())
            dtypes[key] = _DTYPES.get(dtype, dtype)
    return shapes, dtypes


def _dcp(directory: Path, name: str) -> Iterator[FileInfo]:
    """Yield the model and the optimizer of a torch.distributed.checkpoint, by its metadata."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(directory).read_metadata()
    stored = metadata.state_dict_metadata
    # Of the model; empty for an entry that is no tensor.
    sizes: _Shapes = {}
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
        yield FileInfo(name, "dcp", "model", tuple(sizes), shapes)
    if with_state:
        yield FileInfo(name, "dcp", "optimizer", tuple(with_state))


def _dcp_values(directory: Path) -> Iterator[_Part]:
    """Yield the parts of a torch.distributed.checkpoint, read without the other ranks."""
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

    The part is ``model``, ``optimizer``, ``scheduler`` or, if that is unknown, empty.

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

    The result is None if no segment names a part.
    """
    for depth, segment in enumerate(path[:-1]):
        for part, names in _PARTS.items():
            if segment in names:
                return part, ".".join(path[depth + 1 :])
    return None


def _pickled(data: Any, name: str) -> Iterator[FileInfo]:
    """Yield the parts of a file of ``torch.save``.

    Such a file has DeepSpeed's model states, a full state dict, or an optimizer's.
    """
    if not isinstance(data, Mapping):
        return
    is_deepspeed = isinstance(data.get("param_shapes"), list)
    if is_deepspeed:
        yield from _deepspeed_shapes(data, name)
    for part in MODEL:
        if not isinstance(data.get(part), Mapping):
            continue
        shapes = _full_shapes(data, _shapes(data[part]))
        if is_deepspeed:
            shapes = _without_partitioned(shapes)
        if shapes:
            form = "deepspeed" if part == "module" else "torch"
            keys = tuple(shapes)
            yield FileInfo(f"{name}:{part}", form, "model", keys, shapes)
    state = _optimizer_state(data)
    parameters = [key for key in state.get("state", {}) if isinstance(key, str)]
    if parameters:
        yield FileInfo(name, "torch", "optimizer", tuple(parameters))
    if _is_state_dict(data):
        shapes = _shapes(_of_average(data))
        yield FileInfo(name, "torch", "model", tuple(shapes), shapes)


def _deepspeed_shapes(data: Mapping[str, Any], name: str) -> Iterator[FileInfo]:
    """Yield the shapes of trained and of frozen parameters in DeepSpeed's file of model states."""
    trained: _Shapes = {}
    for group in data["param_shapes"]:
        for key, shape in group.items():
            trained[str(key)] = tuple(shape)
    frozen: _Shapes = {}
    for key, shape in (data.get("frozen_param_shapes") or {}).items():
        frozen[str(key)] = tuple(shape)
    shapes_by_part = {"param_shapes": trained, "frozen_param_shapes": frozen}
    for part, shapes in shapes_by_part.items():
        if shapes:
            keys = tuple(shapes)
            full_shapes = _full_shapes(data, shapes)
            yield FileInfo(f"{name}:{part}", "deepspeed", "model", keys, full_shapes)


def _without_partitioned(shapes: _Shapes) -> _Shapes:
    """Return the shapes without those of parameters whose values are in other files."""
    # For the parameters that it partitioned ZeRO-3 writes empty tensors into the model states.
    return {key: shape for key, shape in shapes.items() if shape != (0,)}


def _optimizer_state(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the optimizer's state dict: the file itself, or its part of that name.

    The result is empty if the file has none.
    """
    if isinstance(data.get("state"), Mapping):
        return data
    for part in OPTIMIZER:
        if part in data:
            state = data[part]
            if isinstance(state, Mapping):
                return state
            return {}
    return {}


def _of_average(state: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the state dict of the model inside a ``torch.optim.swa_utils.AveragedModel``.

    Any other state dict is returned as it is.
    """
    # An averaged model has the model as ``module`` and counts in ``n_averaged``, a buffer:
    # https://docs.pytorch.org/docs/stable/generated/torch.optim.swa_utils.AveragedModel.html
    inner: dict[Any, Any] = {}
    for key, value in state.items():
        if str(key).startswith("module."):
            inner[key.removeprefix("module.")] = value
    if "n_averaged" in state and len(inner) == len(state) - 1:
        return inner
    return state


def _shapes(state: Mapping[Any, Any]) -> _Shapes:
    """Return the shapes of the tensors in a state dict; of sharded tensors the global shape."""
    shapes: _Shapes = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            shapes[str(key)] = tuple(value.size())
    return shapes


def _full_shapes(data: Mapping[str, Any], shapes: _Shapes) -> _Shapes:
    """Return the shapes of the full tensors, where each rank of DeepSpeed's AutoTP saves a shard.

    Args:
        data: The file. It describes the sharding, for its conversion
            (https://github.com/deepspeedai/DeepSpeed/pull/7908): a pattern of names, the shapes of
            the ranks' shards, and the full shape.
        shapes: The shapes of the tensors in the file.
    """
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
