"""Check ``save_only_model``: such a checkpoint holds all weights, and nothing else.

It applies to cells with the option ``save_only_model``, in which the trainer is told to save
checkpoints without optimizer and scheduler. A cell is one point of the test matrix, such as
``fsdp2-bf16_upcast-w2-save_only_model``.

``judge.judge`` calls the check once the run ``train`` has ended. The trace of the run has a
snapshot for each rank and action: the weights of the live model at the action ``save``, and on
rank 0 at the action ``files`` the saved files, with a digest (a hash of the values) for each key.
The check yields findings, such as ``2 of 9 weights are not saved, first 'lm_head.weight'``.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell does not have the check, or None.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, first_three
from pytest_distcompat.driver import Driver
from pytest_distcompat.model_values import Values, adapter_name, flat_parameters, values
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.trace import FileInfo, Trace, UnwrappedInfo

#: Name of a weight -> the digests that files have of it.
_SavedWeights = Mapping[str, set[str]]


def _why_optimizer_is_saved(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the cell does not have the check; None if it does."""
    if cell.option("save_only_model"):
        return None
    return "the cell saves the optimizer too"


@check(
    scenario=TRAIN, until=(("train", "files", 0),), order=15, not_applicable=_why_optimizer_is_saved
)
def save_only_model(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that save_only_model saves all weights, and no optimizer or scheduler state.

    The weights in the checkpoint are bit by bit those trained at the save. A trainer that cannot do
    that must raise when it is built, as ``refuses(..., save_only_model=True, match=...)`` declares.
    transformers raised at the first checkpoint, after hours
    (https://github.com/huggingface/transformers/issues/36626).

    If it fails: weights were not gathered, or were filtered by a name that wrapping had changed.
    """
    run = trace.run()
    at_save = run.at("save")
    yield from every_rank(at_save, cell.world_size, "save")
    if run.unwrapped is None or not run.at("files"):
        yield "the saved files were not read"
        return
    files: list[FileInfo] = []
    for snapshot in run.at("files"):
        files += snapshot.saved
    yield from _state_in(files, "an optimizer", "optimizer")
    yield from _state_in(files, "a scheduler", "scheduler")
    names = _weights(cell, run.unwrapped)
    weights = _saved_weights(run.unwrapped, names, files)
    yield from _unsaved_weights(names, weights)
    if flat_parameters(at_save):
        # FSDP1's FlatParameter joins many parameters, so that single ones cannot be compared.
        return
    trained = values(run, at_save)
    yield from trained.wrong
    yield from _other_saved_weights(names, weights, trained)


def _state_in(files: list[FileInfo], owner: str, holds: str) -> Iterator[str]:
    """Yield a finding if any of the files holds state of that owner.

    Args:
        files: The files.
        owner: The owner in words: ``an optimizer``.
        holds: What such a file holds, as ``FileInfo.holds`` has it: ``optimizer``.
    """
    paths: list[str] = []
    for file in files:
        if file.holds == holds:
            paths.append(repr(file.path))
    if paths:
        places = ", ".join(paths[:3])
        yield f"state of {owner} is in {places}; the checkpoint is of the model alone"


def _unsaved_weights(names: list[str], weights: _SavedWeights) -> Iterator[str]:
    """Yield a finding for the names that have no weight in any file."""
    missing: list[str] = []
    for name in names:
        if name not in weights:
            missing.append(name)
    if missing:
        unsaved = f"{len(missing)} of {len(names)} weights are not saved"
        yield f"{unsaved}, first {first_three(missing)}"


def _other_saved_weights(
    names: list[str], weights: _SavedWeights, trained: Values
) -> Iterator[str]:
    """Yield a finding for the weights that have other values in files than at the save."""
    wrong: list[str] = []
    for name, digests in weights.items():
        if not digests <= _trained_digests(trained, name):
            wrong.append(name)
    if wrong:
        others = f"{len(wrong)} of {len(names)} weights have other values in the checkpoint"
        yield f"{others} than at the save, first {first_three(wrong)}"


def _trained_digests(trained: Values, name: str) -> set[str]:
    """Return the digests that a file may have of a weight.

    A weight may be saved as its float32 master, or as the copy in a lower dtype that the model
    computes with. A buffer may be that of any rank.
    """
    digests: set[str] = set()
    for kind in ("parameter", "buffer", "master"):
        digests.update(trained.of(kind).get(name, ()))
    return digests


def _weights(cell: Cell, unwrapped: UnwrappedInfo) -> list[str]:
    """Return the names of the weights that a checkpoint must hold.

    They are all parameters and persistent buffers; with a LoRA adapter only its parameters.
    """
    names: list[str] = []
    only_trainable = bool(cell.option("lora"))
    for info in unwrapped.parameters:
        if info.trainable or not only_trainable:
            names.append(info.name)
    if only_trainable:
        return names
    for info in unwrapped.buffers:
        if info.persistent:
            names.append(info.name)
    return names


def _saved_weights(
    unwrapped: UnwrappedInfo, names: list[str], files: list[FileInfo]
) -> _SavedWeights:
    """Return name of a weight -> the digests that files have of it, under any of its keys.

    Weights that no file has are left out.
    """
    digests_by_key: dict[str, set[str]] = defaultdict(set)
    for file in files:
        for key, digest in file.digests.items():
            digests_by_key[key].add(digest)
    weights: dict[str, set[str]] = {}
    # Later keys win: a weight's own name comes last.
    for key, name in _keys(unwrapped, names):
        if key in digests_by_key:
            weights[name] = digests_by_key[key]
    return weights


def _keys(unwrapped: UnwrappedInfo, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, name of the weight) for each key that a weight may have in a file.

    First come the names that PEFT gives, then the other names of tied parameters, then the weights'
    own names.
    """
    for name in names:
        yield adapter_name(name), name
    for group in unwrapped.tied:
        for name in group:
            if group[0] in names:
                yield name, group[0]
    for name in names:
        yield name, name
