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
    """Return the answer of ``main`` to a request, from the interpreter and working directory of a rank's ``start``.

    Raises RunFailedError if the process fails.
    """
    request_file, answer = directory / f"{request['kind']}.request.json", directory / f"{request['kind']}.json"
    request_file.write_text(json.dumps(request), encoding="utf-8")
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
    python = (start and start.python) or sys.executable
    done = subprocess.run(
        [python, "-m", "pytest_distcompat.ext.scripts.reading", str(request_file), str(answer)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        cwd=(start and start.cwd) or None,
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

    files = {}
    for path in map(Path, request["paths"]):
        infos = read_files(path if path.is_dir() else path.parent)
        chosen = infos if path.is_dir() else [info for info in infos if info.path.split(":")[0] == path.name]
        files[str(path)] = [dataclasses.asdict(info) for info in chosen]
    return {"files": files}


def _load_final_model(request: Mapping[str, Any]) -> dict[str, Any]:
    """Load the model at ``path`` and return it as an unwrapped model, or return the ``problem``."""
    from pytest_distcompat.checks.export import PREFIX
    from pytest_distcompat.probe.files import module_directories, read_files
    from pytest_distcompat.probe.live import read_unwrapped

    path, checkpoints = Path(request["path"]), [Path(checkpoint) for checkpoint in request["checkpoints"]]
    directory = path if path.is_dir() else path.parent
    if directory.name in module_directories(directory.parent):
        # The script saved the last module of the model last.
        path = directory = directory.parent
    files = _files_of_model(read_files(directory, PREFIX), path, checkpoints)
    answer: dict[str, Any] = {"problem": "", "missing": [], "unexpected": [], "mismatched": [], "unwrapped": None}
    answer["renamed_by_library"] = False
    answer["stored"] = not (directory / "config.json").exists() or bool(module_directories(directory))
    answer["files"] = [dataclasses.asdict(info) for info in files]
    if not any(info.holds == "model" for info in files):
        names = sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())
        return {**answer, "problem": f"holds no weights (files: {', '.join(names) or 'none'})"}
    if loader := _composite_class(directory):
        # The library renames keys when it saves and when it loads: its names are those of the model that it makes of them.
        answer |= {"stored": False, "renamed_by_library": True}
        try:
            return {**answer, "unwrapped": dataclasses.asdict(read_unwrapped(loader(str(directory), device="cpu")))}
        except Exception as error:
            return {**answer, "problem": f"{loader.__name__} raised {type(error).__name__}: {error}"}
    if answer["stored"]:
        return {**answer, "unwrapped": dataclasses.asdict(_read_values(path, checkpoints))}
    try:
        model, loading_info = _model_class(directory).from_pretrained(directory, output_loading_info=True)
    except Exception as error:
        return {**answer, "problem": f"from_pretrained raised {type(error).__name__}: {error}"}
    for title in ("missing", "unexpected", "mismatched"):
        answer[title] = sorted(str(key[0] if isinstance(key, tuple) else key) for key in loading_info[f"{title}_keys"])
    return {**answer, "unwrapped": dataclasses.asdict(read_unwrapped(model))}


def _files_of_model(infos: Iterable[FileInfo], path: Path, checkpoints: Collection[Path]) -> list[FileInfo]:
    """Return the files of the model at ``path``: that file, or those in that directory and its module directories."""
    # If they hold no model, it is all files below the directory, except for the checkpoints that the run wrote there.
    from pytest_distcompat.checks.export import PREFIX
    from pytest_distcompat.probe.files import module_directories

    directory = path if path.is_dir() else path.parent
    files = [(directory / info.path.removeprefix(PREFIX).split(":")[0], info) for info in infos]
    if not path.is_dir():
        return [info for file, info in files if file == path]
    places = {path, *(path / name for name in module_directories(path))}
    direct = [info for file, info in files if file in places or (file.parent in places and file.is_file())]
    if any(info.holds == "model" for info in direct):
        return direct
    excluded = {checkpoint for checkpoint in checkpoints if checkpoint != path and checkpoint not in path.parents}
    return [info for file, info in files if excluded.isdisjoint({file, *file.parents})]


def _composite_class(directory: Path) -> Any:
    """Return the class of sentence-transformers that loads the directory; None if it wrote none, or is not installed."""
    # https://sbert.net/docs/sentence_transformer/usage/custom_models.html
    try:
        config = json.loads((directory / "config_sentence_transformers.json").read_text(encoding="utf-8"))
        library: Any = importlib.import_module("sentence_transformers")
    except (OSError, ValueError, ImportError):
        return None
    return getattr(library, str(config.get("model_type")), library.SentenceTransformer)


def _model_class(directory: Path) -> Any:
    """Return the class that the model's configuration names."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    return getattr(transformers, names[0]) if names else transformers.AutoModel


def _read_values(path: Path, checkpoints: Collection[Path]) -> UnwrappedInfo:
    """Return the values in the files of a model without ``config.json``, which no library can load."""
    from pytest_distcompat.probe.files import read_saved
    from pytest_distcompat.trace import ParameterInfo, UnwrappedInfo

    infos = _files_of_model(read_saved(path if path.is_dir() else path.parent), path, checkpoints)
    digests = {key: digest for info in infos if info.holds == "model" for key, digest in info.digests.items()}
    dtype = "float32"
    return UnwrappedInfo(tuple(ParameterInfo(key, (), dtype, digest=digest) for key, digest in digests.items()))


_ANSWERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {"files": _read_files, "final": _load_final_model}

if __name__ == "__main__":
    main(*sys.argv[1:])
