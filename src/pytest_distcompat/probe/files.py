"""Reader of saved files: the keys in each file, or its values, in each library's own format.

After a trainer has saved a checkpoint or exported a model, ``worker`` calls ``read_files`` on rank
0 (or on the first rank of each machine), and ``ext.scripts`` does so for the files of a script.
Checks look for each parameter's name in the result. ``read_saved`` also reads values, for the check
``save_only_model`` of checkpoints that have the model alone.

Formats, each read by its library or its JSON, never by the trainer's ``load``:

- safetensors: ``model.safetensors``; of shards an index beside them says which key is where;
- dcp (torch.distributed.checkpoint): a directory of ``.distcp`` files with a ``.metadata`` file,
  which lists all keys with their shapes;
- files of ``torch.save``: a state dict, or a dictionary of parts such as ``model`` and
  ``optimizer``; those of DeepSpeed describe what the other ranks' files hold.

Example: a file ``model.safetensors`` becomes ``FileInfo("model.safetensors", "safetensors",
"model", keys=("lm_head.weight", ...), shapes={"lm_head.weight": (64, 16), ...}, ...)``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat.probe.checkpoint_parts import Part, Shapes
from pytest_distcompat.probe.dcp import dcp_values, read_dcp
from pytest_distcompat.probe.pickles import load_pickle, pickled_values, read_pickle
from pytest_distcompat.probe.tensors import digest
from pytest_distcompat.trace import FileInfo


@dataclass(frozen=True)
class SavedFile:
    """A file that a trainer saved.

    Attributes:
        path: A path that torch and safetensors can open.
        name: The path from the checkpoint's directory on, as messages have it.
        key_prefix: What comes before the file's keys in the whole model's state dict; mostly empty.
            It is ``2.`` in the directory ``2_Dense`` of a *composite model*, one of
            sentence-transformers, which writes each of its modules into a directory of its own, and
            in the file that DeepSpeed's ``PipelineModule`` writes for layer 2.
    """

    path: Path
    name: str
    key_prefix: str


def read_files(
    directory: Path, prefix: str = "", networks: Collection[str] = ()
) -> tuple[FileInfo, ...]:
    """Return what every file below the directory holds of a model or an optimizer: its keys.

    Call it when all ranks have finished writing. A file that holds neither, such as
    ``config.json``, has no record; a file with several parts has one for each.

    Args:
        directory: The directory of a checkpoint or an export.
        prefix: What comes before the path of each file in its name: ``export/``.
        networks: Names of the networks of the model, of which a file of ``torch.save`` may have a
            state dict each: ``{"critic": {"weight": tensor}}``.
    """
    infos: list[FileInfo] = []
    for file in _files(directory):
        for info in _infos(file.path, prefix, file.name, networks):
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

    A digest is a hash of a tensor, ``32:1f...``. Each model, optimizer or scheduler has a record;
    only a model's values have digests.
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
        return FileInfo(file.name, format="", holds=holds, keys=tuple(keys), digests={})
    digests: dict[str, str] = {}
    for key, value in content.items():
        qualified_key = f"{file.key_prefix}{key}"
        digests[qualified_key] = digest(value)
    return FileInfo(file.name, format="", holds=holds, keys=tuple(digests), digests=digests)


def _files(directory: Path) -> Iterator[SavedFile]:
    """Yield each file below the directory, sorted by path.

    Read each in the loop: its path may be valid only until the iteration ends (``readable``).
    """
    with readable(directory) as root:
        for path in sorted(root.rglob("*")):
            if not path.is_file():
                continue
            relative = path.relative_to(root)
            key_prefix = module_prefix(directory / relative.parent) or layer_prefix(path.name)
            yield SavedFile(path, str(relative), key_prefix)


def _infos(path: Path, prefix: str, relative: str, networks: Collection[str]) -> Iterator[FileInfo]:
    """Yield the records of one file, with the keys as they are in it; none for another format.

    Args:
        path: A path that can be opened.
        prefix: As in ``read_files``.
        relative: The path from the checkpoint's directory on.
        networks: As in ``read_files``.
    """
    name = prefix + relative
    if path.suffix == ".safetensors":
        shapes, dtypes = _safetensors(path)
        yield FileInfo(
            name,
            format="safetensors",
            holds="model",
            keys=tuple(shapes),
            shapes=shapes,
            dtypes=dtypes,
        )
    elif path.name.endswith(INDEX):
        # A file of that name that is no such index is left out, like any file of another format.
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            yield _index(path, name)
    elif path.name == ".metadata":
        # The checkpoint is the directory, so the record has the name of that.
        relative_directory = Path(relative).parent
        yield from read_dcp(path.parent, f"{prefix}{relative_directory}")
    elif path.suffix in PICKLED:
        content = load_pickle(path)
        yield from read_pickle(content, name, networks)


def _index(path: Path, name: str) -> FileInfo:
    """Return the index of sharded weights: the file of each key, and the size of all in bytes."""
    index = json.loads(path.read_text(encoding="utf-8"))
    file_by_key = dict(index["weight_map"].items())
    metadata = index.get("metadata") or {}
    return FileInfo(
        name,
        format="index",
        holds="index",
        keys=tuple(file_by_key),
        files=file_by_key,
        total_size=metadata.get("total_size"),
    )


def _values(path: Path) -> Iterator[Part]:
    """Yield the parts of a file: a model has tensors, an optimizer and a scheduler any entries."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        yield "model", load_file(path)
    elif path.name == ".metadata":
        yield from dcp_values(path.parent)
    elif path.suffix in PICKLED:
        data = load_pickle(path)
        if isinstance(data, Mapping):
            yield from pickled_values(data)


def module_directories(directory: Path) -> dict[str, str]:
    """Map the name of each module directory of a composite model to its module's name.

    ``{"": "0", "1_Pooling": "1", "2_Dense": "2"}`` is that of a model of sentence-transformers,
    whose first module is in the model's own directory. The result is empty for any other model.
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
    # The directory is the model's own, where its first module is ("" in its modules.json), or that
    # of another module, whose modules.json is in the directory above.
    name = module_directories(directory).get("")
    if name is None:
        name = module_directories(directory.parent).get(directory.name)
    if name is None:
        return ""
    return f"{name}."


@contextlib.contextmanager
def readable(directory: Path) -> Iterator[Path]:
    """Provide a path of the directory that torch and safetensors can open.

    They accept UTF-8 alone, while a path of Linux is any bytes. In place of such a path it is
    ``/proc/self/fd/N``, where N is a descriptor of the directory, open until the block ends. The
    directory need not exist.
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


def _safetensors(path: Path) -> tuple[Shapes, dict[str, str]]:
    """Return the shape and the dtype of each tensor in a safetensors file, by key."""
    from safetensors import safe_open

    shapes: Shapes = {}
    dtypes: dict[str, str] = {}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            tensor = file.get_slice(key)
            dtype = tensor.get_dtype()
            shapes[key] = tuple(tensor.get_shape())
            dtypes[key] = _DTYPES.get(dtype, dtype)
    return shapes, dtypes


def layer_prefix(name: str) -> str:
    """Return what comes before the keys of a file of one layer, ``3.``; empty for other files.

    DeepSpeed's ``PipelineModule`` names its layers by their numbers, and writes the state dict of
    each into a file, ``layer_03-model_states.pt``; under tensor parallelism the rank stands there
    too: https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/pipe/module.py.
    """
    match = re.fullmatch(r"layer_(\d+)(-.+)?-model_states\.pt", name)
    if match is None:
        return ""
    return f"{int(match[1])}."
