"""Part of the check ``export``: the index of an export agrees with its files.

A large model is exported in several files, ``model-00001-of-00002.safetensors``. Beside them is an
index, ``model.safetensors.index.json``, that maps each key to its file (``weight_map``) and has
the size of all tensors in bytes (``total_size``). A reader takes each tensor from the file that the
index names.

``checks.export`` calls ``wrong_index`` with the records of the index and of the files of the model.
It yields findings, such as ``file 'export/model.safetensors.index.json': it names 2 keys that are
not in their files, first 'lm_head.weight' in 'model-00002-of-00002.safetensors'``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pytest_distcompat.cost import BYTES
from pytest_distcompat.trace import FileInfo


def _directory(path: str) -> str:
    """Return the directory of a file: ``export`` of ``export/model.safetensors``."""
    return path.rpartition("/")[0]


def _file_name(path: str) -> str:
    """Return the name of a file: ``model.safetensors`` of ``export/model.safetensors``."""
    return path.rpartition("/")[2]


@dataclass(frozen=True)
class _StoredKey:
    """A key, and the name of a file: one that has the key, or one that an index names for it."""

    key: str
    file_name: str


def wrong_index(index: FileInfo, models: list[FileInfo]) -> Iterator[str]:
    """Yield findings for an index with a wrong file for a key, or with a wrong size.

    Args:
        index: The record of the index. ``index.files`` maps a key to the name of a file.
        models: The records of all files of the model, also in other directories.
    """
    directory = _directory(index.path)
    file_by_name: dict[str, FileInfo] = {}
    for file in models:
        if _directory(file.path) == directory:
            file_by_name[_file_name(file.path)] = file
    yield from _wrong_places(index, file_by_name)
    yield from _total_size(index, file_by_name)


def _stored_keys(file_by_name: Mapping[str, FileInfo]) -> dict[_StoredKey, None]:
    """Return each key of each file, in the order of the findings: a dict, because it keeps it."""
    stored: dict[_StoredKey, None] = {}
    for file_name, file in file_by_name.items():
        for key in file.keys:
            stored[_StoredKey(key, file_name)] = None
    return stored


def _wrong_places(index: FileInfo, file_by_name: Mapping[str, FileInfo]) -> Iterator[str]:
    """Yield findings for keys that are not in the file that the index names, or in others too."""
    stored = _stored_keys(file_by_name)
    lost: list[_StoredKey] = []
    for key, file_name in index.files.items():
        pair = _StoredKey(key, file_name)
        if pair not in stored:
            lost.append(pair)
    in_second_file: list[_StoredKey] = []
    not_in_index: list[_StoredKey] = []
    for pair in stored:
        indexed_name = index.files.get(pair.key)
        if indexed_name == pair.file_name:
            continue
        # The index names another file for the key. If that file has the key too, readers never see
        # this copy, which may be outdated.
        if indexed_name is not None and _StoredKey(pair.key, indexed_name) in stored:
            in_second_file.append(pair)
        else:
            # The index does not name the key, or names a file that lacks it.
            not_in_index.append(pair)
    for problem, pairs in (
        (f"it names {len(lost)} keys that are not in their files", lost),
        (f"{len(in_second_file)} keys are in a second file too", in_second_file),
        (f"{len(not_in_index)} keys beside it are not in it", not_in_index),
    ):
        if pairs:
            first = pairs[0]
            example = f"first {first.key!r} in {first.file_name!r}"
            yield f"file {index.path!r}: {problem}, {example}"


def _total_size(index: FileInfo, file_by_name: Mapping[str, FileInfo]) -> Iterator[str]:
    """Yield a finding if the size in an index is not that of the tensors that it names.

    The size is in bytes, without the headers of the files.
    """
    # In torch's own files tied tensors share memory, so the sum of their sizes is not the total.
    if not all(file.format == "safetensors" for file in file_by_name.values()):
        return
    total_size = 0
    for key, file_name in index.files.items():
        file = file_by_name.get(file_name)
        # Without each tensor's size there is no total to compare with.
        if file is None:
            return
        shape = file.shapes.get(key)
        dtype = file.dtypes.get(key)
        if shape is None or dtype not in BYTES:
            return
        total_size += math.prod(shape) * BYTES[dtype]
    if index.total_size not in {None, total_size}:
        named = f"the tensors that it names have {total_size} bytes"
        yield f"file {index.path!r}: total_size is {index.total_size}; {named}"
