"""Reads files with torch, in a process of its own: pytest's has no torch, and the ranks may still be writing.

``python -m pytest_distcompat.scripts.reading WANTED ANSWER`` is that process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.failures import RunFailedError

if TYPE_CHECKING:
    from pytest_distcompat.trace import FileInfo, UnwrappedInfo

#: Seconds; a model of the size of a test's is read in a few.
TIMEOUT = 600.0


def read_in_a_process(start: Mapping[str, Any], directory: Path, wanted: Mapping[str, Any]) -> Any:
    """The answer of ``main`` to ``wanted``, from the Python that the ranks had, as one of them told at its ``start``.

    Raises RunFailedError if that process fails.
    """
    asked, answer = directory / f"{wanted['what']}.asked.json", directory / f"{wanted['what']}.json"
    asked.write_text(json.dumps(wanted), encoding="utf-8")
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
    done = subprocess.run(
        [start.get("python", sys.executable), "-m", "pytest_distcompat.scripts.reading", str(asked), str(answer)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        cwd=start.get("cwd"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        told = f"{wanted['what']} could not be read:\n{done.stdout}{done.stderr}"
        raise RunFailedError(told, hard=done.returncode < 0)
    return json.loads(answer.read_text(encoding="utf-8"))


def main(asked: str, answer: str) -> None:
    """Answer one question, in JSON."""
    wanted = json.loads(Path(asked).read_text(encoding="utf-8"))
    found = _ANSWERS[wanted["what"]](wanted)
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


def _files(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in the files at or below each path."""
    from pytest_distcompat.probe import read_files

    found = {}
    for path in map(Path, wanted["paths"]):
        infos = read_files(path if path.is_dir() else path.parent)
        kept = infos if path.is_dir() else [one for one in infos if one.path.split(":")[0] == path.name]
        found[str(path)] = [dataclasses.asdict(info) for info in kept]
    return {"files": found}


def _final(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What loads of what a run left, as a unwrapped model; ``problem`` says what does not."""
    from pytest_distcompat.checks.export import PREFIX
    from pytest_distcompat.probe import read_files, read_unwrapped

    path, checkpoints = Path(wanted["path"]), [Path(one) for one in wanted["checkpoints"]]
    directory = path if path.is_dir() else path.parent
    files = _left(read_files(directory, PREFIX), path, checkpoints)
    found: dict[str, Any] = {"problem": "", "missing": [], "unexpected": [], "mismatched": [], "unwrapped": None}
    found["stored"] = not (directory / "config.json").exists()
    found["files"] = [dataclasses.asdict(info) for info in files]
    if not any(info.holds == "model" for info in files):
        there = sorted(str(one.relative_to(directory)) for one in directory.rglob("*") if one.is_file())
        return {**found, "problem": f"holds no weights (files: {', '.join(there) or 'none'})"}
    if found["stored"]:
        return {**found, "unwrapped": dataclasses.asdict(_stored(path, checkpoints))}
    try:
        model, told = _model_class(directory).from_pretrained(directory, output_loading_info=True)
    except Exception as error:
        return {**found, "problem": f"from_pretrained raised {type(error).__name__}: {error}"}
    for title in ("missing", "unexpected", "mismatched"):
        found[title] = sorted(str(key[0] if isinstance(key, tuple) else key) for key in told[f"{title}_keys"])
    return {**found, "unwrapped": dataclasses.asdict(read_unwrapped(model))}


def _left(infos: Iterable[FileInfo], path: Path, checkpoints: Collection[Path]) -> list[FileInfo]:
    """What is meant by ``path``: the file; of a directory what lies in it, as ``from_pretrained`` takes it; only where no model
    does, what lies below it, but for the checkpoints that the run wrote there on its way.
    """
    from pytest_distcompat.checks.export import PREFIX

    directory = path if path.is_dir() else path.parent
    places = [(directory / info.path.removeprefix(PREFIX).split(":")[0], info) for info in infos]
    if not path.is_dir():
        return [info for place, info in places if place == path]
    here = [info for place, info in places if place == path or (place.parent == path and place.is_file())]
    if any(info.holds == "model" for info in here):
        return here
    on_the_way = {one for one in checkpoints if one != path and one not in path.parents}
    return [info for place, info in places if on_the_way.isdisjoint({place, *place.parents})]


def _model_class(directory: Path) -> Any:
    """The class that the configuration names."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    return getattr(transformers, names[0]) if names else transformers.AutoModel


def _stored(path: Path, checkpoints: Collection[Path]) -> UnwrappedInfo:
    """A model that no library loads: what stands in its files is what it is."""
    from pytest_distcompat.probe import read_saved
    from pytest_distcompat.trace import ParameterInfo, UnwrappedInfo

    infos = _left(read_saved(path if path.is_dir() else path.parent), path, checkpoints)
    digests = {key: digest for info in infos if info.holds == "model" for key, digest in info.digests.items()}
    dtype = "float32"
    return UnwrappedInfo(tuple(ParameterInfo(key, (), dtype, digest=digest) for key, digest in digests.items()))


_ANSWERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {"files": _files, "final": _final}

if __name__ == "__main__":
    main(*sys.argv[1:])
