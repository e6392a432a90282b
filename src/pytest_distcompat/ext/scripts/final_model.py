"""The check ``final_model_loadable``: the model that a script left loads, with the trained values.

``ScriptRun`` (module ``result``) calls ``check_final_model`` when a user's test says
``run.check("final_model_loadable")``. The input is the trace of the run, its *cell* (what should
have run, such as ``fsdp2-fp32-w2``: FSDP2 in float32 on 2 ranks), and the path that the script
wrote, such as ``out/`` with ``model.safetensors``. The result is findings as sentences, none if all
is well.

A trace is all *snapshots* of a run: what was recorded in each rank (process that trains) of model
and optimizer after each step, each save, and at the end.

The *unwrapped* model is the model before DDP, FSDP or DeepSpeed wraps it. Its names and shapes are
the right ones for the files. The trained values are known by *digests*: hashes of each tensor, or
of the part of it that a rank stores. No tensor is gathered, and none is loaded in this process.

The comparison itself is that of the suite's check ``export``: it compares a run that trains and
saves with a run that loads. Here both are made of what was recorded and what was read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import and_others, named_ranks
from pytest_distcompat.checks.export import names_in, same_values
from pytest_distcompat.decode import decode
from pytest_distcompat.ext.scripts.recorder import END, STRIDE
from pytest_distcompat.model_values import adapter_name, trainable_names
from pytest_distcompat.trace import FileInfo, ParameterInfo, RunTrace, Snapshot, UnwrappedInfo


def check_final_model(
    run: RunTrace,
    cell: Cell,
    path: Path | None,
    checkpoints: Sequence[str],
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    *,
    saved_name: Callable[[str], str],
) -> list[str]:
    """Return what is wrong with the model that a run left; an empty list if it is sound.

    It is sound if it loads, if no key is missing, unexpected or of another shape, and if each
    parameter and persistent buffer equals the trained one after the last step. It is loaded by the
    class of sentence-transformers that wrote it, by transformers' ``from_pretrained``, or, without
    a ``config.json``, as a DCP, safetensors or torch file.

    Args:
        run: The run that trained.
        cell: The cell in which it trained.
        path: The directory or file of the model; None if it is unknown.
        checkpoints: Directories below ``path`` that do not belong to the model.
        read: Sends a request to ``scripts.reading``, which loads the model in another process, and
            returns the answer.
        saved_name: Maps a key of the files to the name in the unwrapped model.
    """
    if path is None:
        return ["the directory of the final model is unknown: pass launch(output=...)"]
    if not path.exists():
        return [f"{path} does not exist: the run left no model"]
    request = {"kind": "final", "path": str(path.resolve()), "checkpoints": checkpoints}
    loaded = read(request)
    if loaded["problem"]:
        return [f"{path}: {loaded['problem']}"]
    findings = _compare(run, cell, loaded, saved_name)
    return [f"{path}: {finding}" for finding in findings]


def _compare(
    run: RunTrace, cell: Cell, read: Mapping[str, Any], saved_name: Callable[[str], str]
) -> Iterator[str]:
    """Yield the differences between the trained model and the one that was left.

    Args:
        run: The run that trained.
        cell: The cell in which it trained.
        read: The answer of ``reading`` (its keys are described at ``_load_final_model``). If
            ``stored`` in it is true, the values are those of the files, under the files' keys;
            otherwise those of a model that a library loaded.
        saved_name: Maps a key of the files to the name in the unwrapped model.
    """
    # Keys that transformers' ``from_pretrained`` complained about.
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
        # The library saves under names of its own, so any name is right here. Whether the files
        # have all values shows below.
        written_names = tuple(sorted(_model_keys(files)))
        unwrapped = dataclasses.replace(unwrapped, written_names=written_names)
    yield from names_in(cell, unwrapped, files)
    # The index of a snapshot is 100 (STRIDE) times the steps taken until then, plus an offset: 0
    # for the step itself, 10 for a save after it, 90 (END) for the end of the script.
    last_step = max(run.indices("step"), default=0) // STRIDE
    trained = list(_trained(run, last_step))
    if len(trained) < run.world_size:
        yield _missing_model(run, trained, last_step)
        return
    loaded = _loaded_model(unwrapped, read, saved_name)
    # The files have the LoRA adapter alone, without the model that it adapts.
    only_adapter = read["stored"] and cell.option("lora")
    if only_adapter:
        loaded = _with_names_of_adapted(unwrapped, loaded)
    yield from _untied(unwrapped, loaded)
    loaded = _under_first_names(unwrapped, loaded)
    # Make the two runs that the check ``export`` compares: one that trained and saved, one that
    # loaded.
    end = last_step * STRIDE + END
    saved = []
    # The comparison reads the second snapshot ``files``. In the suite's run the first one is that
    # of a checkpoint.
    for number in (1, 2):
        snapshot = Snapshot(
            rank=0, run="train", action="files", index=end + number, files=tuple(files)
        )
        saved.append(snapshot)
    snapshots = (first, *trained, *saved)
    train = RunTrace("train", run.world_size, snapshots, cell=cell.id)
    reloaded = Snapshot(rank=0, run="reload", action="reload", index=0, unwrapped=loaded)
    reload = RunTrace("reload", 1, (reloaded,), cell=cell.id)
    compared_names = trainable_names(unwrapped.parameters) if only_adapter else None
    yield from same_values(train, reload, only=compared_names)


def _with_names_of_adapted(unwrapped: UnwrappedInfo, adapter: UnwrappedInfo) -> UnwrappedInfo:
    """Return what the files of a LoRA adapter hold, by the names in the model with the adapter.

    PEFT saves the adapter only, under shorter names.
    """
    name_by_key = {adapter_name(name): name for name in trainable_names(unwrapped.parameters)}
    return _renamed(adapter, lambda key: name_by_key.get(key, key))


def _model_keys(files: Iterable[FileInfo]) -> set[str]:
    """Return the keys of the files that hold a model, rather than optimizer state."""
    keys: set[str] = set()
    for file in files:
        if file.holds == "model":
            keys.update(file.keys)
    return keys


def _missing_model(run: RunTrace, trained: Iterable[Snapshot], last: int) -> str:
    """Return a message that the model of some ranks was not recorded after the last step.

    Args:
        run: The run.
        trained: The snapshots of the ranks that had their model.
        last: The last step.
    """
    recorded = {snapshot.rank for snapshot in trained}
    gone = [rank for rank in range(run.world_size) if rank not in recorded]
    ranks = named_ranks(gone, run.world_size)
    return (
        f"the model of {ranks} was gone at the end: "
        f"nothing says which weights it had after step {last}, the last"
    )


def _loaded_model(
    unwrapped: UnwrappedInfo, read: Mapping[str, Any], saved_name: Callable[[str], str]
) -> UnwrappedInfo:
    """Return the model that was read, with the names of the unwrapped model.

    The arguments are those of ``_compare``.
    """
    # A library that loads a model may have mapped the files' keys back already. A name of the
    # unwrapped model stays as it is then.
    already_unwrapped: set[str] = set()
    if not read["stored"]:
        for info in (*unwrapped.parameters, *unwrapped.buffers):
            already_unwrapped.add(info.name)

    def unwrapped_name(key: str) -> str:
        if key in already_unwrapped:
            return key
        return saved_name(key)

    return _renamed(decode(UnwrappedInfo, read["unwrapped"]), unwrapped_name)


def _untied(unwrapped: UnwrappedInfo, loaded: UnwrappedInfo) -> Iterator[str]:
    """Yield a finding for each tied tensor that was saved with different values under its names.

    A tied tensor is one parameter with several names, such as the input and output embeddings of a
    language model. ``unwrapped.tied`` has the names of each.
    """
    digests = {}
    for info in (*loaded.parameters, *loaded.buffers):
        digests[info.name] = info.digest
    for names in unwrapped.tied:
        saved = [name for name in names if name in digests]
        # With one name only, or none, the loop has nothing to compare.
        for alias in saved[1:]:
            if digests[alias] != digests[saved[0]]:
                yield (
                    f"{alias!r} has other values than {saved[0]!r}: "
                    "in the trained model they are one tensor"
                )


def _under_first_names(unwrapped: UnwrappedInfo, loaded: UnwrappedInfo) -> UnwrappedInfo:
    """Return the loaded model with each tied tensor once, under its first name.

    ``torch.nn.Module.state_dict`` has all names of a tied tensor, ``named_parameters`` the first
    only.
    """
    first_names: dict[str, str] = {}
    for tied_names in unwrapped.tied:
        first_names.update(dict.fromkeys(tied_names, tied_names[0]))
    renamed = _renamed(loaded, lambda name: first_names.get(name, name))
    # By name, so that of several entries with the same name one stays.
    parameters = {info.name: info for info in renamed.parameters}
    return dataclasses.replace(renamed, parameters=tuple(parameters.values()))


def _renamed(unwrapped: UnwrappedInfo, new_name: Callable[[str], str]) -> UnwrappedInfo:
    """Return the model with other names for its parameters and buffers."""
    parameters: list[ParameterInfo] = []
    for info in unwrapped.parameters:
        name = new_name(info.name)
        parameters.append(dataclasses.replace(info, name=name))
    buffers: list[ParameterInfo] = []
    for info in unwrapped.buffers:
        name = new_name(info.name)
        buffers.append(dataclasses.replace(info, name=name))
    return dataclasses.replace(unwrapped, parameters=tuple(parameters), buffers=tuple(buffers))


def _trained(run: RunTrace, last: int) -> Iterator[Snapshot]:
    """Yield the latest snapshot of each rank after the last step that has the model.

    It may be of the step itself, of a save after it, or of the end of the script. It is labeled as
    the snapshot of an export after that step, because the check ``export`` reads that.
    """
    latest: dict[int, Snapshot] = {}
    for snapshot in run.snapshots:
        if snapshot.model is None or snapshot.index // STRIDE != last:
            continue
        earlier = latest.get(snapshot.rank)
        if earlier is None or snapshot.index > earlier.index:
            latest[snapshot.rank] = snapshot
    index = last * STRIDE + END
    for rank in range(run.world_size):
        if rank in latest:
            yield dataclasses.replace(latest[rank], action="export", index=index)
