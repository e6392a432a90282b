"""Check that the model a script leaves in its output directory loads, and that it holds the trained values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import and_others, named_ranks
from pytest_distcompat.checks._values import adapter_name
from pytest_distcompat.checks.export import names_in, same_values
from pytest_distcompat.decode import decode
from pytest_distcompat.ext.scripts.recorder import END, STRIDE
from pytest_distcompat.trace import FileInfo, RunTrace, Snapshot, UnwrappedInfo


def check_final_model(
    run: RunTrace,
    cell: Cell,
    path: Path | None,
    checkpoints: Sequence[str],
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    *,
    saved_name: Callable[[str], str],
) -> list[str]:
    """Return what is wrong with the model that the run left at ``path``; an empty list if it is sound.

    Its weights load by the class of sentence-transformers that wrote them, by transformers' ``from_pretrained`` (or,
    without a ``config.json``, as a DCP, safetensors or torch file), no key is missing, unexpected or of another shape, and
    each parameter and persistent buffer equals the trained one after the last step. ``checkpoints`` are no part of it;
    ``read`` sends a request to ``scripts.reading``.
    """
    if path is None:
        return ["the directory of the final model is unknown: pass launch(output=...)"]
    if not path.exists():
        return [f"{path} does not exist: the run left no model"]
    loaded = read({"kind": "final", "path": str(path.resolve()), "checkpoints": checkpoints})
    if loaded["problem"]:
        return [f"{path}: {loaded['problem']}"]
    return [f"{path}: {finding}" for finding in _compare(run, cell, loaded, saved_name)]


def _compare(run: RunTrace, cell: Cell, read: Mapping[str, Any], saved_name: Callable[[str], str]) -> Iterator[str]:
    """Yield the differences between the trained model and the one that was read."""
    for title in ("missing", "unexpected", "mismatched"):
        if read[title]:
            yield f"from_pretrained: {title} key {and_others(read[title])}"
    first, unwrapped = run.first("build_model"), run.unwrapped
    if first is None or unwrapped is None:
        yield "the unwrapped model was not recorded"
        return
    files = tuple(decode(FileInfo, file).renamed(saved_name) for file in read["files"])
    if read["renamed_by_library"]:
        # What the library's own class loads has the library's names; the values below show whether it loads all.
        written = {key for file in files if file.holds == "model" for key in file.keys}
        unwrapped = dataclasses.replace(unwrapped, written_names=tuple(sorted(written)))
    yield from names_in(cell, unwrapped, list(files))
    last = max(run.indices("step"), default=0) // STRIDE
    trained = list(_trained(run, last))
    if len(trained) < run.world_size:
        gone = sorted({*range(run.world_size)} - {snapshot.rank for snapshot in trained})
        ranks = named_ranks(gone, run.world_size)
        yield f"the model of {ranks} was gone at the end: nothing says which weights it had after step {last}, the last"
        return
    saved = [Snapshot(0, "train", "files", last * STRIDE + END + n, files=files) for n in (1, 2)]
    train = RunTrace("train", run.world_size, (first, *trained, *saved), cell=cell.id)
    # A library may load names that it has mapped when it saved; what it still calls otherwise is a part of the model by itself.
    known = {info.name for info in (*unwrapped.parameters, *unwrapped.buffers)}
    kept = frozenset() if read["stored"] else known
    loaded = decode(UnwrappedInfo, read["unwrapped"])
    loaded = _renamed(loaded, lambda key: key if key in kept else saved_name(key))
    only = None
    if read["stored"] and cell.option("lora"):
        # The adapter alone, as PEFT names it; the model below it was there before.
        trainable = {adapter_name(info.name): info.name for info in unwrapped.parameters if info.trainable}
        loaded, only = _renamed(loaded, lambda key: trainable.get(key, key)), set(trainable.values())
    yield from _untied(unwrapped, loaded)
    loaded = _under_first_names(unwrapped, loaded)
    reload = Snapshot(0, "reload", "reload", 0, unwrapped=loaded)
    yield from same_values(train, RunTrace("reload", 1, (reload,), cell=cell.id), only=only)


def _untied(unwrapped: UnwrappedInfo, loaded: UnwrappedInfo) -> Iterator[str]:
    """Yield a finding for each name of a tied tensor that was saved with other values than its first name."""
    digests = {info.name: info.digest for info in (*loaded.parameters, *loaded.buffers)}
    for names in unwrapped.tied:
        saved = [name for name in names if name in digests]
        for alias in saved[1:]:
            if digests[alias] != digests[saved[0]]:
                yield f"{alias!r} has other values than {saved[0]!r}: in the trained model they are one tensor"


def _under_first_names(unwrapped: UnwrappedInfo, loaded: UnwrappedInfo) -> UnwrappedInfo:
    """Return the loaded model with each tied tensor once, under the name that the trained model's parameters have.

    A state dict has all names of a tensor (``torch.nn.Module.state_dict``), ``named_parameters`` the first one alone.
    """
    first_names = {name: group[0] for group in unwrapped.tied for name in group}
    renamed = _renamed(loaded, lambda name: first_names.get(name, name))
    parameters = {info.name: info for info in renamed.parameters}
    return dataclasses.replace(renamed, parameters=tuple(parameters.values()))


def _renamed(unwrapped: UnwrappedInfo, name: Callable[[str], str]) -> UnwrappedInfo:
    """Return the model with other names for its parameters and buffers."""
    parameters = tuple(dataclasses.replace(info, name=name(info.name)) for info in unwrapped.parameters)
    buffers = tuple(dataclasses.replace(info, name=name(info.name)) for info in unwrapped.buffers)
    return dataclasses.replace(unwrapped, parameters=parameters, buffers=buffers)


def _trained(run: RunTrace, last: int) -> Iterator[Snapshot]:
    """Yield each rank's latest snapshot of all values since the last step."""
    for rank in range(run.world_size):
        snapshots = [m for m in run.snapshots if m.rank == rank and m.model is not None and m.index // STRIDE == last]
        if snapshots:
            latest = max(snapshots, key=lambda snapshot: snapshot.index)
            yield dataclasses.replace(latest, action="export", index=last * STRIDE + END)
