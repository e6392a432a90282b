"""Check that the model a script leaves in its output directory loads, and that it holds the trained values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def _compare(
    run: RunTrace, cell: Cell, read: Mapping[str, Any], saved_name: Callable[[str], str]
) -> Iterator[str]:
    """Yield the differences between the trained model and the one that was read.

    ``read`` is what ``scripts.reading`` answered. ``stored`` in it says that the values are those of the files themselves,
    under the names that stand there, and not those of a model that a library made of them.
    """
    for title in ("missing", "unexpected", "mismatched"):
        if read[title]:
            yield f"from_pretrained: {title} key {and_others(read[title])}"
    first = run.first("build_model")
    unwrapped = run.unwrapped
    if first is None or unwrapped is None:
        yield "the unwrapped model was not recorded"
        return
    files = [decode(FileInfo, file).renamed(saved_name) for file in read["files"]]
    if read["renamed_by_library"]:
        # What the library's own class loads has the library's names; the values below show whether it loads all.
        written_names = tuple(sorted(_model_keys(files)))
        unwrapped = dataclasses.replace(unwrapped, written_names=written_names)
    yield from names_in(cell, unwrapped, files)
    last = max(run.indices("step"), default=0) // STRIDE
    trained = list(_trained(run, last))
    if len(trained) < run.world_size:
        yield _missing_model(run, trained, last)
        return
    loaded = _loaded_model(unwrapped, read, saved_name)
    only = None
    if read["stored"] and cell.option("lora"):
        # The adapter alone, as PEFT names it; the model below it was there before.
        trainable = [info.name for info in unwrapped.parameters if info.trainable]
        name_by_adapter_name = {adapter_name(name): name for name in trainable}
        loaded = _renamed(loaded, lambda key: name_by_adapter_name.get(key, key))
        only = set(trainable)
    yield from _untied(unwrapped, loaded)
    loaded = _under_first_names(unwrapped, loaded)
    # The check of exports compares two runs: here one that trains and saves, and one that loads.
    end = last * STRIDE + END
    saved = [Snapshot(0, "train", "files", end + nth, files=tuple(files)) for nth in (1, 2)]
    train = RunTrace("train", run.world_size, (first, *trained, *saved), cell=cell.id)
    reload = RunTrace(
        "reload", 1, (Snapshot(0, "reload", "reload", 0, unwrapped=loaded),), cell=cell.id
    )
    yield from same_values(train, reload, only=only)


def _model_keys(files: Iterable[FileInfo]) -> set[str]:
    """Return the keys under which the files hold tensors of a model."""
    keys: set[str] = set()
    for file in files:
        if file.holds == "model":
            keys.update(file.keys)
    return keys


def _missing_model(run: RunTrace, trained: Iterable[Snapshot], last: int) -> str:
    """Return a message that some ranks had no model any more at the end, so that their last values are unknown."""
    recorded = {snapshot.rank for snapshot in trained}
    gone = [rank for rank in range(run.world_size) if rank not in recorded]
    ranks = named_ranks(gone, run.world_size)
    return f"the model of {ranks} was gone at the end: nothing says which weights it had after step {last}, the last"


def _loaded_model(
    unwrapped: UnwrappedInfo, read: Mapping[str, Any], saved_name: Callable[[str], str]
) -> UnwrappedInfo:
    """Return the model that was read, with the unwrapped model's names in place of those that the script saves under."""
    # A library may load names that it has mapped when it saved; what it still calls otherwise is a part of the model by itself.
    already_unwrapped: set[str] = set()
    if not read["stored"]:
        already_unwrapped.update(info.name for info in (*unwrapped.parameters, *unwrapped.buffers))

    def unwrapped_name(key: str) -> str:
        if key in already_unwrapped:
            return key
        return saved_name(key)

    return _renamed(decode(UnwrappedInfo, read["unwrapped"]), unwrapped_name)


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
    first_names: dict[str, str] = {}
    for tied_names in unwrapped.tied:
        first_names.update(dict.fromkeys(tied_names, tied_names[0]))
    renamed = _renamed(loaded, lambda name: first_names.get(name, name))
    parameters = {info.name: info for info in renamed.parameters}
    return dataclasses.replace(renamed, parameters=tuple(parameters.values()))


def _renamed(unwrapped: UnwrappedInfo, name: Callable[[str], str]) -> UnwrappedInfo:
    """Return the model with other names for its parameters and buffers."""
    parameters = tuple(
        dataclasses.replace(info, name=name(info.name)) for info in unwrapped.parameters
    )
    buffers = tuple(dataclasses.replace(info, name=name(info.name)) for info in unwrapped.buffers)
    return dataclasses.replace(unwrapped, parameters=parameters, buffers=buffers)


def _trained(run: RunTrace, last: int) -> Iterator[Snapshot]:
    """Yield each rank's latest snapshot of all values since the last step, as one of an export after that step."""
    latest: dict[int, Snapshot] = {}
    for snapshot in run.snapshots:
        if snapshot.model is None or snapshot.index // STRIDE != last:
            continue
        earlier = latest.get(snapshot.rank)
        if earlier is None or snapshot.index > earlier.index:
            latest[snapshot.rank] = snapshot
    for rank in range(run.world_size):
        if rank in latest:
            yield dataclasses.replace(latest[rank], action="export", index=last * STRIDE + END)
