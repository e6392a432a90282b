"""Reader of saved files in a process of its own, because pytest's process does not import torch.

``python -m pytest_distcompat.ext.scripts.reading REQUEST ANSWER`` is that process.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.failures import RunFailedError

if TYPE_CHECKING:
    from pytest_distcompat.events import Start
    from pytest_distcompat.trace import FileInfo, UnwrappedInfo

#: How long that process may take, in seconds; a model of a test's size takes a few.
TIMEOUT = 600.0


def read_in_a_process(start: Start | None, directory: Path, request: Mapping[str, Any]) -> Any:
    """Return the answer of ``main`` to a request.

    It runs with the interpreter and in the working directory of a rank's ``start``.

    Raises:
        RunFailedError: The process failed.
    """
    request_file = directory / f"{request['kind']}.request.json"
    answer = directory / f"{request['kind']}.json"
    request_file.write_text(json.dumps(request), encoding="utf-8")
    python_path = str(Path(__file__).parents[2])
    if os.environ.get("PYTHONPATH"):
        python_path = os.pathsep.join((os.environ["PYTHONPATH"], python_path))
    python = sys.executable
    working_directory = None
    if start is not None:
        python = start.python or sys.executable
        working_directory = start.cwd or None
    done = subprocess.run(
        [python, "-m", "pytest_distcompat.ext.scripts.reading", str(request_file), str(answer)],
        env={**os.environ, "PYTHONPATH": python_path, "CUDA_VISIBLE_DEVICES": ""},
        cwd=working_directory,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        message = f"{request['kind']} could not be read:\n{done.stdout}{done.stderr}"
        raise RunFailedError(message, hard=done.returncode < 0)
    return json.loads(answer.read_text(encoding="utf-8"))


def main(request_file: str, answer_file: str) -> None:
    """Answer one request; both are files of JSON."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    answer = _ANSWERS[request["kind"]](request)
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


def _read_files(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys in the files at or below each of the ``paths``."""
    from pytest_distcompat.probe.files import read_files

    files: dict[str, list[dict[str, Any]]] = {}
    for name in request["paths"]:
        path = Path(name)
        if path.is_dir():
            infos = list(read_files(path))
        else:
            # A file that holds several things is listed as ``FILE:PART``.
            infos = []
            for info in read_files(path.parent):
                file_name, *_ = info.path.split(":")
                if file_name == path.name:
                    infos.append(info)
        files[str(path)] = [dataclasses.asdict(info) for info in infos]
    return {"files": files}


def _load_final_model(request: Mapping[str, Any]) -> dict[str, Any]:
    """Load the model at ``path`` and return it as an unwrapped model, or return the ``problem``.

    The answer also has the ``files`` of the model, and whether its values are those in the files
    (``stored``), or those of a model that a library made of them, perhaps under names of its own
    (``renamed_by_library``).
    """
    from pytest_distcompat.checks.export import PREFIX
    from pytest_distcompat.probe.files import module_directories, read_files

    path = Path(request["path"])
    checkpoints = [Path(checkpoint) for checkpoint in request["checkpoints"]]
    directory = path if path.is_dir() else path.parent
    if directory.name in module_directories(directory.parent):
        # The script saved the last module of the model last.
        directory = directory.parent
        path = directory
    files = _files_of_model(read_files(directory, PREFIX), path, checkpoints)
    has_configuration = (directory / "config.json").exists()
    stored = not has_configuration or bool(module_directories(directory))
    answer: dict[str, Any] = {
        "problem": "",
        "missing": [],
        "unexpected": [],
        "mismatched": [],
        "unwrapped": None,
        "renamed_by_library": False,
        "stored": stored,
        "files": [dataclasses.asdict(info) for info in files],
    }
    if not any(info.holds == "model" for info in files):
        names = ", ".join(_names_of_files(directory)) or "none"
        answer["problem"] = f"holds no weights (files: {names})"
        return answer
    composite_class = _composite_class(directory)
    if composite_class is not None:
        # The library renames keys when it saves and when it loads: its names are those of the model
        # that it makes of them.
        loaded = _load_composite(composite_class, directory)
        return {**answer, "stored": False, "renamed_by_library": True, **loaded}
    if stored:
        unwrapped = _read_values(path, checkpoints)
        return {**answer, "unwrapped": dataclasses.asdict(unwrapped)}
    return answer | _load_pretrained(directory)


def _names_of_files(directory: Path) -> list[str]:
    """Return the names of all files below the directory, relative to it, in order."""
    names = []
    for file in directory.rglob("*"):
        if file.is_file():
            names.append(str(file.relative_to(directory)))
    return sorted(names)


def _load_composite(model_class: Any, directory: Path) -> dict[str, Any]:
    """Load the directory by a class of sentence-transformers.

    Returns:
        The ``unwrapped`` model, or the ``problem``.
    """
    from pytest_distcompat.probe.live import read_unwrapped

    try:
        unwrapped = read_unwrapped(model_class(str(directory), device="cpu"))
        return {"unwrapped": dataclasses.asdict(unwrapped)}
    except Exception as error:
        raised = f"raised {type(error).__name__}: {error}"
        return {"problem": f"{model_class.__name__} {raised}"}


def _load_pretrained(directory: Path) -> dict[str, Any]:
    """Load the directory by ``from_pretrained``.

    Returns:
        The ``unwrapped`` model and its wrong keys, or the ``problem``.
    """
    from pytest_distcompat.probe.live import read_unwrapped

    try:
        model, loading_info = _model_class(directory).from_pretrained(
            directory, output_loading_info=True
        )
    except Exception as error:
        return {"problem": f"from_pretrained raised {type(error).__name__}: {error}"}
    loaded: dict[str, Any] = {}
    for title in ("missing", "unexpected", "mismatched"):
        keys: list[str] = []
        for key in loading_info[f"{title}_keys"]:
            # A mismatched key comes with the two shapes.
            if isinstance(key, tuple):
                keys.append(str(key[0]))
            else:
                keys.append(str(key))
        loaded[title] = sorted(keys)
    loaded["unwrapped"] = dataclasses.asdict(read_unwrapped(model))
    return loaded


def _files_of_model(
    infos: Iterable[FileInfo], path: Path, checkpoints: Collection[Path]
) -> list[FileInfo]:
    """Return the files of the model at ``path``.

    They are that file, or those in that directory and its module directories. If they hold no
    model, it is all files below the directory, except for the checkpoints that the run wrote there.
    """
    from pytest_distcompat.probe.files import module_directories

    if not path.is_dir():
        return [info for info in infos if _file_of(info, path.parent) == path]
    infos = list(infos)
    model_directories = {path}
    model_directories.update(path / name for name in module_directories(path))
    direct: list[FileInfo] = []
    for info in infos:
        file = _file_of(info, path)
        # A distributed checkpoint is listed as its directory.
        is_direct = file.parent in model_directories and file.is_file()
        if is_direct or file in model_directories:
            direct.append(info)
    if any(info.holds == "model" for info in direct):
        return direct
    excluded = set()
    for checkpoint in checkpoints:
        if checkpoint != path and checkpoint not in path.parents:
            excluded.add(checkpoint)
    outside_checkpoints: list[FileInfo] = []
    for info in infos:
        file = _file_of(info, path)
        if excluded.isdisjoint({file, *file.parents}):
            outside_checkpoints.append(info)
    return outside_checkpoints


def _file_of(info: FileInfo, directory: Path) -> Path:
    """Return the path of a file that was listed relative to the directory.

    It may be listed as ``FILE:PART``.
    """
    from pytest_distcompat.checks.export import PREFIX

    return directory / info.path.removeprefix(PREFIX).split(":")[0]


def _composite_class(directory: Path) -> Any:
    """Return the class of sentence-transformers that loads the directory.

    None if that library did not write the directory, or is not installed.
    """
    # https://sbert.net/docs/sentence_transformer/usage/custom_models.html
    try:
        config = json.loads(
            (directory / "config_sentence_transformers.json").read_text(encoding="utf-8")
        )
        library: Any = importlib.import_module("sentence_transformers")
    except (OSError, ValueError, ImportError):
        return None
    return getattr(library, str(config.get("model_type")), library.SentenceTransformer)


def _model_class(directory: Path) -> Any:
    """Return the class that the model's configuration names."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModel


def _read_values(path: Path, checkpoints: Collection[Path]) -> UnwrappedInfo:
    """Return the values in the files of a model without ``config.json``.

    No library can load such a model.
    """
    from pytest_distcompat.probe.files import read_saved
    from pytest_distcompat.trace import ParameterInfo, UnwrappedInfo

    directory = path if path.is_dir() else path.parent
    digest_by_key: dict[str, str] = {}
    for info in _files_of_model(read_saved(directory), path, checkpoints):
        if info.holds == "model":
            digest_by_key.update(info.digests)
    # Digests are of values in whatever dtype, so that the dtype does not matter.
    parameters = []
    for key, digest in digest_by_key.items():
        parameters.append(ParameterInfo(key, (), "float32", digest=digest))
    return UnwrappedInfo(tuple(parameters))


_ANSWERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "files": _read_files,
    "final": _load_final_model,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
