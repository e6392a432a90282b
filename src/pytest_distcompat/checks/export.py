"""Do the exported weights load with the model's own library?

And does a checkpoint of the model alone hold all of it?
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import EXPORTED, Snapshots, check, every_rank, first_three
from pytest_distcompat.checks._renamed import renamed
from pytest_distcompat.cost import BYTES
from pytest_distcompat.driver import Driver
from pytest_distcompat.model_values import (
    Digests,
    Values,
    adapter_name,
    compare,
    exported_weights,
    flat_parameters,
    in_tf32,
    precision_of_products,
    values,
)
from pytest_distcompat.scenario import EXPORT, TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import FileInfo, RunTrace, Snapshot, Trace, UnwrappedInfo
from pytest_distcompat.wording import and_others

#: Where an export stands among the files of a run, relative to the checkpoint.
PREFIX = "export/"

#: By the name of a weight the digests that files have of it.
_SavedWeights = Mapping[str, set[str]]


def _why_not_exported(cell: Cell, driver: type[Driver]) -> str | None:
    for action in ("export", "reload", "evaluate"):
        if not driver.can(action):
            return f"the driver has no {action}()"
    return None


@check(
    scenario=EXPORT,
    until=(("train", "files", 1), ("reload", "evaluate", 0)),
    order=13,
    not_applicable=_why_not_exported,
    depends_on=EXPORTED,
)
def export(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the exported weights are the trained ones, under the unwrapped model's names.

    The files hold whole tensors and no optimizer state; an index names one file for each and the
    size of all; an adapter has PEFT's names. Loaded in one process, every value equals the trained
    one (the master, or the copy that the model computed with), and so do outputs on one batch,
    within the precision's tolerance.

    If it fails: ``module.`` or ``_orig_mod.`` come from the wrapped model's own ``state_dict()``.
    ``from_pretrained`` takes such names for missing weights, which it initializes at random.
    """
    train = trace.run("train")
    reload = trace.run("reload")
    if train.unwrapped is None or reload.unwrapped is None:
        yield "the unwrapped model was not recorded"
        return
    yield from every_rank(train.at("export"), cell.world_size, "export")
    yield from names_in(cell, train.unwrapped, _exported_files(train))
    yield from same_values(train, reload)
    evaluated = train.at("evaluate")
    yield from every_rank(evaluated, cell.world_size, "evaluate")
    comparable = _with_exported_buffers(cell, train, reload.unwrapped, evaluated)
    yield from _outputs(cell, train, comparable, reload.at("evaluate"))


def _exported_files(train: RunTrace) -> list[FileInfo]:
    """Return the files of the export, without those of the checkpoint."""
    files: list[FileInfo] = []
    for snapshot in train.at("files", 1):
        for file in snapshot.files:
            if file.path.startswith(PREFIX):
                files.append(file)
    return files


def _with_exported_buffers(
    cell: Cell, train: RunTrace, reloaded: UnwrappedInfo, evaluated: Snapshots
) -> Snapshots:
    """Return the snapshots of the ranks that had the exported buffers, all if none had."""
    # A rank with statistics of its own (BatchNorm), which are not those in the file, computes
    # something else.
    with_own_buffers = _ranks_with_own_buffers(train, reloaded)
    if len(with_own_buffers) >= cell.world_size:
        return evaluated
    snapshots: list[Snapshot] = []
    for snapshot in evaluated:
        if snapshot.rank not in with_own_buffers:
            snapshots.append(snapshot)
    return tuple(snapshots)


def _ranks_with_own_buffers(train: RunTrace, reloaded: UnwrappedInfo) -> set[int]:
    """Return the ranks that had, at the export, another value of a buffer than the exported one."""
    exported = {info.name: info.digest for info in reloaded.buffers}
    ranks: set[int] = set()
    for snapshot in train.at("export"):
        buffers = values(train, (snapshot,)).of("buffer")
        for name, digests in buffers.items():
            if name in exported and set(digests) - {exported[name]}:
                ranks.add(snapshot.rank)
    return ranks


@dataclass(frozen=True)
class _ExpectedKeys:
    """Keys that exported files should have, and the shapes under them.

    Attributes:
        cell: The cell.
        names: The model's own names; of a model with an adapter those that PEFT gives the adapter's
            parameters.
        shapes: The shape under each name, as far as it is known.
        known: All names of the unwrapped model, with those of the adapter.
        written: The names that the model's library writes in place of the model's own.
        tied: For each name of a tied parameter all of its names.
    """

    cell: Cell
    names: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]
    known: frozenset[str]
    written: frozenset[str]
    tied: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, cell: Cell, unwrapped: UnwrappedInfo) -> _ExpectedKeys:
        """Return what the files of a model should have."""
        model_names = frozenset(unwrapped.state_dict)
        names = model_names
        shapes: dict[str, tuple[int, ...]] = {}
        if cell.option("lora"):
            for info in unwrapped.parameters:
                if info.trainable:
                    shapes[adapter_name(info.name)] = tuple(info.shape)
            names = frozenset(shapes)
        else:
            for info in (*unwrapped.parameters, *unwrapped.buffers):
                shapes[info.name] = tuple(info.shape)
        tied: dict[str, frozenset[str]] = {}
        for group in unwrapped.tied:
            tied.update(dict.fromkeys(group, frozenset(group)))
        return cls(
            cell, names, shapes, names | model_names, frozenset(unwrapped.written_names), tied
        )

    def written_by_library(self, keys: Collection[str]) -> bool:
        """Tell whether some keys are names that the library alone gives to parameters."""
        return not self.written.isdisjoint(set(keys) - self.names)


def names_in(cell: Cell, unwrapped: UnwrappedInfo, files: list[FileInfo]) -> Iterator[str]:
    """Yield findings about the names and shapes in exported files."""
    for file in files:
        if file.holds not in {"model", "index"}:
            keys = f"{len(file.keys)} keys of an {file.holds}"
            yield f"file {file.path!r} holds {keys}; expected the model alone"
    expected = _ExpectedKeys.of(cell, unwrapped)
    models: list[FileInfo] = []
    for file in files:
        if file.holds == "model":
            models.append(file)
    for file in models:
        yield from _other_shapes(expected, file)
        yield from _unknown_keys(expected, file)
    for file in files:
        if file.holds == "index":
            yield from _index(file, models)
    yield from _missing_names(expected, models)


def _other_shapes(expected: _ExpectedKeys, file: FileInfo) -> Iterator[str]:
    """Yield a finding for each tensor of a file that has another shape than in the model."""
    if expected.written_by_library(file.keys):
        return  # a name that the library writes may be the model's own of another tensor
    for key in file.keys:
        if key not in file.shapes or key not in expected.shapes:
            continue
        shape = tuple(file.shapes[key])
        expected_shape = expected.shapes[key]
        if shape != expected_shape:
            finding = f"{key!r} has shape {shape}; {expected_shape} in the unwrapped model"
            yield f"file {file.path!r}: {finding}"


def _unknown_keys(expected: _ExpectedKeys, file: FileInfo) -> Iterator[str]:
    """Yield a finding for the keys of a file that are no names of the model.

    The finding says what they have in common, and which name the first one may stand for.
    """
    unknown = set(file.keys) - expected.names - expected.written
    if not unknown:
        return
    strategy = STRATEGIES.get(expected.cell.strategy)
    first = min(unknown)
    closest = strategy.canonical(first, expected.cell, expected.known)
    hint = ""
    if closest in expected.names and closest != first:
        hint = f"; expected {closest!r}"
    groups = renamed(unknown, expected.names | expected.written)
    cause = "".join(f"{group}: " for group in groups)
    way_out = ""
    if groups:
        way_out = groups[0].way_out
    keys = f"key {and_others(unknown)} are"
    if len(unknown) == 1:
        keys = f"key {and_others(unknown)} is"
    finding = f"{cause}{keys} none of the model's own"
    yield f"file {file.path!r}: {finding}{hint}{way_out}"


def _missing_names(expected: _ExpectedKeys, models: list[FileInfo]) -> Iterator[str]:
    """Yield a finding for the names that no file has; of tied ones one is enough."""
    keys: set[str] = set()
    for file in models:
        keys.update(file.keys)
    names = expected.names
    if expected.written_by_library(keys):
        names = expected.written
    missing: list[str] = []
    for name in sorted(names - keys):
        tied = expected.tied.get(name, frozenset())
        if tied.isdisjoint(keys):
            missing.append(name)
    if missing:
        absent = f"{len(missing)} of {len(names)} names are in no exported file"
        yield f"{absent}, first {first_three(missing)}"


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


def _file_name(path: str) -> str:
    return path.rpartition("/")[2]


@dataclass(frozen=True)
class _StoredKey:
    """A key of a tensor, and the name of a file that has it, or that an index names for it."""

    key: str
    file_name: str


def _index(index: FileInfo, models: list[FileInfo]) -> Iterator[str]:
    """Yield findings for an index that names other files for its keys than they are in.

    And for one that gives another size than its tensors have.
    """
    directory = _directory(index.path)
    file_by_name: dict[str, FileInfo] = {}
    for file in models:
        if _directory(file.path) == directory:
            file_by_name[_file_name(file.path)] = file
    yield from _wrong_places(index, file_by_name)
    yield from _total_size(index, file_by_name)


def _wrong_places(index: FileInfo, file_by_name: Mapping[str, FileInfo]) -> Iterator[str]:
    """Yield findings for keys that are not in the file that the index names, or in others too."""
    # A dict, because the order is that of the findings.
    stored: dict[_StoredKey, None] = {}
    for file_name, file in file_by_name.items():
        for key in file.keys:
            stored[_StoredKey(key, file_name)] = None
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
        # Readers take the one that the index names, and what is in the other file is lost, or
        # outdated.
        if indexed_name is not None and _StoredKey(pair.key, indexed_name) in stored:
            in_second_file.append(pair)
        else:
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
    # In torch's files tied tensors share memory.
    if not all(file.format == "safetensors" for file in file_by_name.values()):
        return
    total_size = 0
    for key, file_name in index.files.items():
        file = file_by_name.get(file_name)
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


def same_values(
    train: RunTrace, reload: RunTrace, *, only: Collection[str] | None = None
) -> Iterator[str]:
    """Yield findings for the reloaded parameters and buffers that are not the trained ones.

    Args:
        train: The run that exported the model.
        reload: The run of one process that loaded the export.
        only: The names to compare; all if there are none.
    """
    loaded = reload.unwrapped
    exported = train.at("export")
    if loaded is None or flat_parameters(exported):
        return  # a flat parameter has no names to compare by; the outputs are compared instead
    parameters = exported_weights(train, reload)
    buffers = values(train, exported).of("buffer")
    loaded_parameters = {info.name: (info.digest,) for info in loaded.parameters}
    loaded_buffers: dict[str, tuple[str, ...]] = {}
    for info in loaded.buffers:
        if info.persistent:
            loaded_buffers[info.name] = (info.digest,)
    yield from compare("parameter", _only(only, parameters), loaded_parameters, "after the reload")
    yield from compare("buffer", _only(only, buffers), loaded_buffers, "after the reload")


def _only(names: Collection[str] | None, digests: Digests) -> Digests:
    """Return the digests under these names; all if there are no ``names`` to choose by."""
    if names is None:
        return digests
    chosen: dict[str, tuple[str, ...]] = {}
    for name in digests:
        if name in names:
            chosen[name] = digests[name]
    return chosen


def _outputs(
    cell: Cell, train: RunTrace, trained: Sequence[Snapshot], reloaded: Sequence[Snapshot]
) -> Iterator[str]:
    """Yield findings for outputs of the reloaded model that are too far from the trained one's.

    They may differ by the precision's tolerance of gradient norms, relative to the largest output.
    """
    if not reloaded or not reloaded[0].outputs:
        yield "the reloaded model computed nothing"
        return
    expected = reloaded[0].outputs
    infinite = 0
    for value in expected:
        if not math.isfinite(value):
            infinite += 1
    if infinite:
        outputs = f"{infinite} of {len(expected)} outputs of the reloaded model"
        yield f"{outputs} are infinite; expected finite numbers"
        return
    largest = max(abs(value) for value in expected)
    allowed = largest * precision_of_products(cell, train).norm_tolerance
    for snapshot in trained:
        where = f"rank {snapshot.rank}"
        count = len(snapshot.outputs)
        if count != len(expected):
            counts = f"{count} outputs of the trained model; {len(expected)} of the reloaded one"
            yield f"{where}: {counts}"
            continue
        distances = _distances(snapshot.outputs, expected)
        # Not ``any(distance > allowed)``, which is false for NaN.
        if not all(distance <= allowed for distance in distances):
            limit = f"({allowed:.1e} allowed, of {largest:.3g})"
            most = max(distances)
            apart = f"up to {most:.3g} apart {limit}{in_tf32(train)}"
            yield f"{where}: outputs of the trained and of the reloaded model are {apart}"


def _distances(outputs: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Return how far each output is from the expected one."""
    distances: list[float] = []
    for output, expected_output in zip(outputs, expected, strict=True):
        distances.append(abs(output - expected_output))
    return distances


def _why_optimizer_is_saved(cell: Cell, driver: type[Driver]) -> str | None:
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
        return  # flat parameters have no unwrapped names to compare by
    trained = values(run, at_save)
    yield from trained.wrong
    yield from _other_saved_weights(names, weights, trained)


def _state_in(files: list[FileInfo], owner: str, holds: str) -> Iterator[str]:
    """Yield a finding if any of the files holds state of an optimizer, or of a scheduler."""
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
    """Yield a finding for the weights that have another value in files than the trained one."""
    wrong: list[str] = []
    for name, digests in weights.items():
        if not digests <= _trained_digests(trained, name):
            wrong.append(name)
    if wrong:
        others = f"{len(wrong)} of {len(names)} weights have other values in the checkpoint"
        yield f"{others} than at the save, first {first_three(wrong)}"


def _trained_digests(trained: Values, name: str) -> set[str]:
    """Return the digests that a file may have of a weight.

    They are of its master, of a copy in a lower dtype, or of any rank's buffer.
    """
    digests: set[str] = set()
    for kind in ("parameter", "buffer", "master"):
        digests.update(trained.of(kind).get(name, ()))
    return digests


def _weights(cell: Cell, unwrapped: UnwrappedInfo) -> list[str]:
    """Return the names of what a checkpoint of the model must hold.

    Of a model with an adapter these are only the adapter's.
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
    """Return the digests that files have of each weight, under whichever of its keys.

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
    """Yield each key that a weight may have in a file, and the weight's name.

    Keys are the names of PEFT, then those of tied parameters, then the weight's own.
    """
    for name in names:
        yield adapter_name(name), name
    for group in unwrapped.tied:
        for name in group:
            if group[0] in names:
                yield name, group[0]
    for name in names:
        yield name, name
