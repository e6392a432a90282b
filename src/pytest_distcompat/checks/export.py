"""Check ``export``: exported weights load with the model's own library, and are the trained ones.

``judge.judge`` calls the check once both runs have ended. It gets a cell, one point of the test
matrix such as ``fsdp2-bf16_upcast-w2``, and a trace of two runs (a run is one process group from
start to end):

- ``train``, on the cell's ranks, exports the model after 20 steps, and evaluates it on one batch;
- ``reload``, in one process without the trainer, loads the export and evaluates it as well.

For each rank and action the trace has a snapshot: what the rank recorded of its model, with digests
(hashes) of values, of the files, and of the outputs. The check yields findings, such as ``file
'export/model.safetensors': key 'module.lm_head.weight' is none of the model's own; expected
'lm_head.weight'``; none if all is right.

Names, then values, then outputs are compared. ``names_in`` and ``same_values`` are used by
``ext.scripts``, too, for models that a script exports. The *unwrapped* model is the one before
anything wraps it; its names are those that a user loads by.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell does not have the check, or None;
``depends_on`` has the facets of a cell (precision, options, ...) on which the outcome depends, so
that of cells with equal facets the default profile tests only one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import EXPORTED, Snapshots, check, every_rank, first_three
from pytest_distcompat.checks._index import wrong_index
from pytest_distcompat.checks._outputs import far_outputs
from pytest_distcompat.checks._renamed import renamed
from pytest_distcompat.driver import Driver
from pytest_distcompat.model_values import (
    Digests,
    adapter_name,
    base_weight_of_embedding,
    compare,
    exported_weights,
    flat_parameters,
    in_tf32,
    precision_of_products,
    values,
)
from pytest_distcompat.scenario import EXPORT
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import FileInfo, RunTrace, Snapshot, Trace, UnwrappedInfo
from pytest_distcompat.wording import and_others

#: With this the paths of exported files begin, among the paths of all files that a run saved.
PREFIX = "export/"


def _why_not_exported(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the cell does not have the check; None if it does."""
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
    within the precision's tolerance. The built-in drivers merge an adapter into its base for these.

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
    """Return the records of the exported files, without those of the checkpoint."""
    # The second action ``files`` of the run comes after the export.
    files: list[FileInfo] = []
    for snapshot in train.at("files", 1):
        for file in snapshot.files:
            if file.path.startswith(PREFIX):
                files.append(file)
    return files


def _with_exported_buffers(
    cell: Cell, train: RunTrace, reloaded: UnwrappedInfo, evaluated: Snapshots
) -> Snapshots:
    """Return the snapshots of the ranks whose outputs can be compared with those of the export.

    BatchNorm keeps statistics of each rank's own data in buffers. One rank's buffers are exported;
    the model on another rank computes something else. All snapshots are returned if no rank has the
    exported buffers.
    """
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
        names: The names that must be in files: the model's own. For a model with a LoRA adapter
            they are those that PEFT gives the adapter's parameters.
        shapes: Name -> shape, where the shape is known.
        known: All names of the unwrapped model, and those of the adapter.
        written: The names that the model's library writes in place of the model's own.
        optional: The names that files may have beside these.
        tied: Name of a tied parameter -> all names of the same tensor.
    """

    cell: Cell
    names: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]
    known: frozenset[str]
    written: frozenset[str]
    optional: frozenset[str]
    tied: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, cell: Cell, unwrapped: UnwrappedInfo) -> _ExpectedKeys:
        """Return the keys that the files of an exported model should have."""
        model_names = frozenset(unwrapped.state_dict)
        names = model_names
        shapes: dict[str, tuple[int, ...]] = {}
        optional: set[str] = set()
        if cell.option("lora"):
            for info in unwrapped.parameters:
                if info.trainable:
                    shapes[adapter_name(info.name)] = tuple(info.shape)
            optional = _optional_of_adapter(unwrapped, shapes)
            names = frozenset(shapes)
        else:
            for info in (*unwrapped.parameters, *unwrapped.buffers):
                shapes[info.name] = tuple(info.shape)
        tied: dict[str, frozenset[str]] = {}
        for group in unwrapped.tied:
            all_names = set(group)
            if cell.option("lora"):
                all_names.update(map(adapter_name, group))
            tied.update(dict.fromkeys(all_names, frozenset(all_names)))
        return cls(
            cell=cell,
            names=names,
            shapes=shapes,
            known=names | model_names,
            written=frozenset(unwrapped.written_names),
            optional=frozenset(optional),
            tied=tied,
        )

    def written_by_library(self, keys: Collection[str]) -> bool:
        """Tell whether any key is a name that only the library gives, not the model itself."""
        return not self.written.isdisjoint(set(keys) - self.names)


def _optional_of_adapter(unwrapped: UnwrappedInfo, trained: Collection[str]) -> set[str]:
    """Return the names that PEFT may write beside those of the trained parameters.

    Args:
        unwrapped: The unwrapped model.
        trained: PEFT's names of the trained parameters.
    """
    optional: set[str] = set()
    for info in unwrapped.parameters:
        if not info.trainable and base_weight_of_embedding(info.name):
            optional.add(info.name)
    for group in unwrapped.tied:
        # The second name of a weight that is no parameter of its own.
        optional.update(filter(base_weight_of_embedding, group))
        # Layers share a vector of the adapter, which has other names in these.
        short_names = set(map(adapter_name, group))
        if not short_names.isdisjoint(trained):
            optional |= short_names
    # Random projections are buffers, also under several names.
    buffers = set(unwrapped.state_dict)
    buffers.difference_update(info.name for info in unwrapped.parameters)
    buffers.difference_update(*unwrapped.tied)
    optional.update(map(adapter_name, buffers))
    return optional


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
            yield from wrong_index(file, models)
    yield from _missing_names(expected, models)


def _other_shapes(expected: _ExpectedKeys, file: FileInfo) -> Iterator[str]:
    """Yield a finding for each tensor of a file that has another shape than in the model."""
    if expected.written_by_library(file.keys):
        # A key that the library writes may be the model's own name of another tensor.
        return
    for key in file.keys:
        if key not in file.shapes or key not in expected.shapes:
            continue
        shape = tuple(file.shapes[key])
        expected_shape = expected.shapes[key]
        if shape != expected_shape:
            finding = f"{key!r} has shape {shape}; {expected_shape} in the unwrapped model"
            yield f"file {file.path!r}: {finding}"


def _unknown_keys(expected: _ExpectedKeys, file: FileInfo) -> Iterator[str]:
    """Yield one finding for all keys of a file that are no names of the model.

    It says what the keys have in common, which name the first one may stand for, and what to do if
    a library has renamed them.
    """
    unknown = set(file.keys) - expected.names - expected.written - expected.optional
    if not unknown:
        return
    strategy = STRATEGIES.get(expected.cell.strategy)
    first = min(unknown)
    closest = strategy.canonical(first, expected.cell, expected.known)
    hint = ""
    if closest in expected.names and closest != first:
        hint = f"; expected {closest!r}"
    # Groups of keys that differ from names in the same part, as in an extra ``_orig_mod.``. A part
    # that a library may have put in comes with advice (``way_out``).
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
    """Yield a finding for the names that no file has; one name of a tied tensor is enough."""
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


def same_values(
    train: RunTrace, reload: RunTrace, *, only: Collection[str] | None = None
) -> Iterator[str]:
    """Yield findings for the reloaded parameters and buffers that are not the trained ones.

    Args:
        train: The run that exported the model.
        reload: The run of one process that loaded the export.
        only: The names to compare; None for all.
    """
    loaded = reload.unwrapped
    exported = train.at("export")
    if loaded is None or flat_parameters(exported):
        # FSDP1's FlatParameter joins many parameters, which have no names of their own then. The
        # outputs are compared all the same.
        return
    # The digests that the files should have, of masters or of the live parameters.
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
    """Return the digests (hashes by name) under these names; all for None."""
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
    """Yield findings if the outputs of the trained and of the reloaded model are too far apart.

    They may differ by the precision's tolerance of gradient norms, relative to the largest output.

    Args:
        cell: The cell.
        train: The run that trained the model.
        trained: The snapshots of its ranks after ``evaluate``.
        reloaded: The snapshot of the one process that reloaded the export, after ``evaluate``.
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
    tolerance = precision_of_products(cell, train).norm_tolerance
    for snapshot in trained:
        where = f"rank {snapshot.rank}"
        count = len(snapshot.outputs)
        if count != len(expected):
            counts = f"{count} outputs of the trained model; {len(expected)} of the reloaded one"
            yield f"{where}: {counts}"
            continue
        far = far_outputs(snapshot.outputs, expected, tolerance)
        if far is not None:
            apart = f"up to {far.most:.3g} apart {far.limit}{in_tf32(train)}"
            yield f"{where}: outputs of the trained and of the reloaded model are {apart}"
