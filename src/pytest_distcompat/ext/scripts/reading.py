"""Reader of saved files in a process of its own, because pytest's process does not import torch.

``ScriptRun`` (module ``result``) calls ``read_in_a_process`` with a *request*, a dict, and gets the
*answer*, another one:

- ``{"kind": "files", "paths": ["out/checkpoint-3"]}``: which keys the saved files hold. The answer
  is ``{"files": {"out/checkpoint-3": [INFO, ...]}}``, where INFO is a ``trace.FileInfo`` as a dict.
- ``{"kind": "final", "path": "out", "checkpoints": [...]}``: load the model that the script left in
  ``out``. The answer is described at ``_load_final_model``.

``python -m pytest_distcompat.ext.scripts.reading REQUEST ANSWER`` is the process. Both are files of
JSON in the directory of the run.

An *unwrapped* model is the model before DDP, FSDP or DeepSpeed wraps it. Its names of parameters
are the right ones in saved files too. Values are returned as *digests*, hashes of each tensor.
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

#: How long the process may take, in seconds; a model of a test's size takes a few.
TIMEOUT = 600.0


def read_in_a_process(start: Start | None, directory: Path, request: Mapping[str, Any]) -> Any:
    """Start the process, and return its answer to a request.

    Args:
        start: The first event of a rank. The process gets the rank's interpreter and working
            directory, because a script's environment (``uv run``) may have libraries, and a model's
            own modules, that this one has not. None: those of this process.
        directory: The directory of the run, for the files of request and answer.
        request: See the module.

    Raises:
        RunFailedError: The process failed.
    """
    request_file = directory / f"{request['kind']}.request.json"
    answer = directory / f"{request['kind']}.json"
    request_file.write_text(json.dumps(request), encoding="utf-8")
    # The interpreter may not have this package. Its directory comes last, so that nothing in it
    # hides a package of the script.
    python_path = str(Path(__file__).parents[3])
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
        # A negative code is a signal: the process crashed while it loaded the model.
        message = f"{request['kind']} could not be read:\n{done.stdout}{done.stderr}"
        raise RunFailedError(message, hard=done.returncode < 0)
    return json.loads(answer.read_text(encoding="utf-8"))


def main(request_file: str, answer_file: str) -> None:
    """Answer one request in this process; the arguments are two files of JSON."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    answer = _ANSWERS[request["kind"]](request)
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


def _read_files(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer ``{"kind": "files", "paths": [...]}``: the files at or below each path."""
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
    """Answer ``{"kind": "final", "path": ..., "checkpoints": [...]}``: load the final model.

    The keys of the answer:

    - ``problem``: why the model cannot be loaded; empty if it can.
    - ``unwrapped``: the model as a ``trace.UnwrappedInfo``, with a digest (hash) of each tensor;
      None with a problem.
    - ``missing``, ``unexpected``, ``mismatched``: keys that ``from_pretrained`` complains about.
    - ``stored``: whether the values were read from the files, under the files' keys; otherwise they
      are those of a model that a library made of the files.
    - ``renamed_by_library``: whether that library has names of its own in files.
    - ``files``: the files of the model, each as a ``trace.FileInfo``.
    """
    from pytest_distcompat.checks.export import PREFIX
    from pytest_distcompat.probe.files import module_directories, read_files

    path = Path(request["path"])
    checkpoints = [Path(checkpoint) for checkpoint in request["checkpoints"]]
    directory = path if path.is_dir() else path.parent
    if directory.name in module_directories(directory.parent):
        # sentence-transformers saves a model as several modules, each in a directory such as
        # ``1_Pooling``. The path is that of the last one: the model is the directory above.
        directory = directory.parent
        path = directory
    # ``PREFIX`` (``export/``) is put before their paths, as before those of files that a driver
    # exports.
    files = _files_of_model(read_files(directory, PREFIX), path, checkpoints)
    # ``from_pretrained`` of transformers needs this file.
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
    # A class of sentence-transformers, which makes a model of several modules.
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
    """Return the names of all files below the directory, relative to it, sorted."""
    names = []
    for file in directory.rglob("*"):
        if file.is_file():
            names.append(str(file.relative_to(directory)))
    return sorted(names)


def _load_composite(model_class: Any, directory: Path) -> dict[str, Any]:
    """Load the directory by a class of sentence-transformers.

    Returns:
        The key ``unwrapped`` of the answer, or the key ``problem``.
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
        The keys ``unwrapped``, ``missing``, ``unexpected`` and ``mismatched`` of the answer, or the
        key ``problem``.
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
            # A mismatched key comes as a tuple with the two shapes.
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
    """Return the files of the model at ``path``, without those of checkpoints beside it.

    If ``path`` is a file, that file. If it is a directory, the files in it and in its module
    directories. If these hold no model, all files below the directory, except for the checkpoints
    that the run wrote there.

    Args:
        infos: The files at or below the directory.
        path: The file or directory that the script left.
        checkpoints: The directories of the checkpoints.
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
    # A checkpoint that contains ``path``, or is ``path``, does not count as one beside the model.
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

    A file that holds several things, such as model and optimizer, is listed as ``FILE:PART``.
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
    """Return the class that ``config.json`` names, such as ``LlamaForCausalLM``.

    A class that transformers does not have (a script's own) is left to ``AutoModel``.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModel


def _read_values(path: Path, checkpoints: Collection[Path]) -> UnwrappedInfo:
    """Return the values in the files of a model that no library can load, by the files' keys.

    It has no ``config.json``: a DCP, safetensors or torch file.
    """
    from pytest_distcompat.probe.files import read_saved
    from pytest_distcompat.trace import ParameterInfo, UnwrappedInfo

    directory = path if path.is_dir() else path.parent
    digest_by_key: dict[str, str] = {}
    # As ``read_files`` has them, and with digests of the values.
    for info in _files_of_model(read_saved(directory), path, checkpoints):
        if info.holds == "model":
            digest_by_key.update(info.digests)
    # Digests are of values in whatever dtype, so that the dtype does not matter.
    parameters = []
    for key, digest in digest_by_key.items():
        parameters.append(ParameterInfo(key, (), "float32", digest=digest))
    return UnwrappedInfo(tuple(parameters))


#: The ``kind`` of a request -> the function that answers it.
_ANSWERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "files": _read_files,
    "final": _load_final_model,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
