"""Do live, optimizer and saved parameters have the names of the unwrapped model?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Snapshots, check, every_rank, first_three
from pytest_distcompat.checks._renamed import Renamed, renamed
from pytest_distcompat.cost import BYTES
from pytest_distcompat.digests import EMPTY
from pytest_distcompat.model_values import (
    across_stages,
    adapter_name,
    expert_parts,
    flat_parameters,
    named_stage,
    stages_of,
    unused,
    values,
)
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import (
    FileInfo,
    OptimizerInfo,
    ParameterInfo,
    RunTrace,
    Snapshot,
    Trace,
    UnwrappedInfo,
)
from pytest_distcompat.wording import and_others, named_ranks


@check(scenario=TRAIN, until=(("train", "files", 0),), order=1)
def names(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that names and shapes are the unwrapped model's, in memory and in every saved file.

    Optimizer state has these names too. A file has every parameter and persistent buffer, or all
    names that the model's library writes in place of them. Building keeps the values of buffers;
    ranks whose ``build_model`` gave other values have those of rank 0 after it. An adapter may have
    PEFT's names (https://huggingface.co/docs/peft/developer_guides/checkpoint).

    If it fails: look for an extra segment (``_orig_mod``, ``module``,
    ``_checkpoint_wrapped_module``) and save with ``get_model_state_dict``, which removes it. For a
    wrapper of the trainer's own set ``self.model`` to the model inside it.
    """
    run = trace.run()
    if run.unwrapped is None:
        yield "the unwrapped model was not recorded"
        return
    expected = _ExpectedNames(cell, run.unwrapped, unused(run))
    yield from _unlike_initial_models(cell, run)
    for snapshot in run.at("build"):
        yield from _changed_buffers(expected, snapshot)
    trained = run.trained
    for snapshot in trained:
        yield from _live_parameters(expected, snapshot)
    yield from _without_live_counterpart(expected, run)
    yield from every_rank(trained, cell.world_size, "three steps")
    yield from _optimizer_state(expected, trained)
    yield from _saved_files(expected, trace)


def _saved_files(expected: _ExpectedNames, trace: Trace) -> Iterator[str]:
    """Yield findings for the files of the checkpoint, and of later ones for their keys."""
    run = trace.run()
    written: list[list[FileInfo]] = []
    for index in run.indices("files"):
        files: list[FileInfo] = []
        for snapshot in run.at_index(index):
            files += snapshot.files
        written.append(files)
    if written:
        yield from _checkpoint(expected, written[0], run)
    elif trace.saves and run.has_values:
        yield from _checkpoint(expected, [], run)
    for later_files in written[1:]:
        yield from _keys(expected, later_files)


def _unlike_initial_models(cell: Cell, run: RunTrace) -> Iterator[str]:
    """Yield a finding if ranks were given unlike models and do not hold that of rank 0.

    What they hold together is compared. DDP sends rank 0's model to all; under FSDP2 each shard is
    of another model, and no rank can see it.

    DDP sends rank 0's to all; of FSDP2 each shard is of another model then, and no rank can see it.
    """
    digests_by_name = _initial_digests(run)
    unlike: set[str] = set()
    for name, digest_by_rank in digests_by_name.items():
        digests = set(digest_by_rank.values())
        if 0 in digest_by_rank and len(digests) > 1:
            unlike.add(name)
    # Experts of DeepSpeed are each rank's own.
    if not unlike or cell.option("ep") != 1:
        return
    initial_dtypes: dict[str, str] = {}
    if run.unwrapped:
        initial_dtypes = {info.name: info.dtype for info in run.unwrapped.parameters}
    built = values(run, run.at("build"))
    built_digests = built.of("parameter")
    built_dtypes = built.dtypes["parameter"]
    wrong: list[str] = []
    for name in unlike & built_digests.keys():
        if _narrower(built_dtypes[name], initial_dtypes[name]):
            continue  # rounded values say nothing
        digest_on_rank_0 = digests_by_name[name][0]
        if built_digests[name] != (digest_on_rank_0,):
            wrong.append(name)
    if wrong:
        problem = (
            f"build_model() gives each rank other values of {and_others(wrong)}, "
            "and build() not those of rank 0 to all"
        )
        yield f"{problem}: ranks hold parts of unlike models; seed all alike, or broadcast"


def _initial_digests(run: RunTrace) -> Mapping[str, Mapping[int, str]]:
    """Return the digests of the parameters that ``build_model`` gave, by name and rank."""
    digests: dict[str, dict[int, str]] = defaultdict(dict)
    for snapshot in run.at("build_model"):
        if snapshot.unwrapped is None:
            continue
        for info in snapshot.unwrapped.parameters:
            # On the meta device it has no values, and one that was cut while it was loaded has a
            # part of them.
            has_values = info.digest not in {"", EMPTY}
            is_full = info.local_numel == math.prod(info.shape)
            if has_values and is_full:
                digests[info.name][snapshot.rank] = info.digest
    return digests


def _narrower(dtypes: Iterable[str], than: str) -> bool:
    """Tell whether one of the dtypes has fewer bytes than the other dtype."""
    sizes = [BYTES.get(dtype, 0) for dtype in dtypes]
    return min(sizes, default=math.inf) < BYTES.get(than, 4)


#: The shape of a tensor.
_Shape = tuple[int, ...]

#: The finding when no saved file is one that ``probe.files`` can read.
NO_READABLE_FILE = (
    "no file holds a model by names; "
    "read are .safetensors, torch.distributed.checkpoint, DeepSpeed's, and what torch.save wrote "
    "(.pt, .pth, .bin, .ckpt, .tar): "
    "a state dict by itself, or under 'model', 'model_state_dict', 'state_dict', 'model_state' "
    "or 'module'"
)


class _ExpectedNames:
    """Names and shapes of the unwrapped model, which live and saved ones must be.

    Tied parameters count under their first name.

    Attributes:
        cell: The cell.
        unwrapped: The unwrapped model.
        first_names: The first name by each other one of the same tensor: of tied parameters, and
            PEFT's of an adapter's.
        parameters: The names of parameters.
        trainable: The names of trainable parameters.
        updated: Those of which an optimizer has state: it has none where it never got a gradient.
        persistent: The names of buffers that are saved.
        not_persistent: The names of buffers that are not saved.
        state_dict: The names that a state dict may have.
        in_files: The names of parameters as files have them.
        written: Names that the model's library writes in place of the model's own.
        shapes: The shapes of parameters and buffers, by name.
    """

    def __init__(self, cell: Cell, unwrapped: UnwrappedInfo, unused: frozenset[str]) -> None:
        self.cell = cell
        self.unwrapped = unwrapped
        self.first_names: dict[str, str] = {}
        for group in unwrapped.tied:
            if group:
                self.first_names.update(dict.fromkeys(group, group[0]))
        self.parameters: set[str] = set()
        self.trainable: set[str] = set()
        for info in unwrapped.parameters:
            name = self.first_name(info.name)
            self.parameters.add(name)
            if info.trainable:
                self.trainable.add(name)
        self.persistent: set[str] = set()
        self.not_persistent: set[str] = set()
        for info in unwrapped.buffers:
            if info.persistent:
                self.persistent.add(info.name)
            else:
                self.not_persistent.add(info.name)
        self.state_dict = set(unwrapped.state_dict)
        if cell.option("lora"):
            for name in self.trainable:
                self.first_names[adapter_name(name)] = name
            self.state_dict |= set(self.first_names)
        self.in_files = self._names_in_files()
        self.written = set(unwrapped.written_names)
        self.shapes: dict[str, _Shape] = {}
        for info in (*unwrapped.parameters, *unwrapped.buffers):
            self.shapes[info.name] = tuple(info.shape)
        never_updated = {self.unwrapped_name(live) for live in unused}
        self.updated = self.trainable - never_updated

    def _names_in_files(self) -> set[str]:
        """Return the names of parameters in the model's own state dict.

        A hook of the model may save a parameter under other names, as torchtitan's does for fused
        projections.
        """
        own: set[str] = set()
        for name in self.unwrapped.state_dict:
            if not name.endswith("_extra_state"):
                own.add(self.first_name(name))
        renamed = self.parameters - own
        if not own or not renamed:
            return self.parameters
        buffers = self.first_names_of(self.unwrapped.buffers)
        other_names = own - self.parameters - buffers
        return self.parameters - renamed | other_names

    def first_name(self, name: str) -> str:
        """Return the first name of the same tensor, tied or PEFT's.

        It is the name itself if there is no other.
        """
        return self.first_names.get(name, name)

    def first_names_of(self, infos: Iterable[ParameterInfo]) -> set[str]:
        """Return the first names of unwrapped parameters or buffers."""
        return {self.first_name(info.name) for info in infos}

    def unwrapped_names_of(self, infos: Iterable[ParameterInfo]) -> set[str]:
        """Return the unwrapped model's names for live parameters or buffers."""
        return {self.unwrapped_name(info.name) for info in infos}

    def unwrapped_name(self, live: str) -> str:
        """Return the unwrapped model's name for a live one.

        It is without the segments that wrappers put in.
        """
        strategy = STRATEGIES.get(self.cell.strategy)
        return self.first_name(
            strategy.canonical(live, self.cell, self.state_dict | self.parameters)
        )

    def shape(self, live: str) -> _Shape | None:
        """Return the shape of the unwrapped parameter or buffer.

        None if there is none of that name.
        """
        return self.shapes.get(self.unwrapped_name(live))

    def known_in(self, file: FileInfo) -> set[str]:
        """Return the names that the file may have."""
        if file.holds == "model":
            return self.state_dict | self.parameters | self.written
        return self.trainable | set(self.first_names)

    def renamed_in(self, file: FileInfo) -> list[Renamed]:
        """Return the groups of the file's unknown keys that differ in the same part of a name."""
        known = self.known_in(file)
        unknown = set(file.keys) - known - self.not_persistent
        return renamed(unknown, known)

    def names_in(self, file: FileInfo) -> set[str]:
        """Return the keys of the file, with the model's own names for renamed ones."""
        names = {self.first_name(key) for key in file.keys}
        for group in self.renamed_in(file):
            for name in group.names.values():
                names.add(self.first_name(name))
        return names

    def written_by_library(self, keys: Iterable[str]) -> bool:
        """Tell whether some keys are names that the library alone gives to parameters."""
        other_keys = set(keys) - self.state_dict
        return not self.written.isdisjoint(other_keys)

    def has_key_of_model(self, file: FileInfo) -> bool:
        """Tell whether any key of the file is a name of the unwrapped model, by ``is_of_model``."""
        return any(self.is_of_model(key) for key in file.keys)

    def is_of_model(self, key: str) -> bool:
        """Tell whether the key is a name of the unwrapped model, perhaps a changed one.

        It may have more before it or in it, or be cut off in front.
        """
        known = self.state_dict | self.parameters | self.written | self.not_persistent
        if self.unwrapped_name(key) in known:
            return True
        segments = key.split(".")
        for nth in range(len(segments)):
            end = ".".join(segments[nth:])
            if end in known:
                return True
        for name in known:
            if name.endswith(f".{key}"):
                return True
        return False


def _changed_buffers(expected: _ExpectedNames, snapshot: Snapshot) -> Iterator[str]:
    """Yield findings for buffers with other values right after build.

    A buffer in another dtype is a finding of the check ``dtypes``.
    """
    live_buffers: dict[str, ParameterInfo] = {}
    for info in snapshot.buffers:
        live_buffers[expected.unwrapped_name(info.name)] = info
    for unwrapped in expected.unwrapped.buffers:
        live = live_buffers.get(expected.first_name(unwrapped.name))
        if live is None or live.dtype != unwrapped.dtype:
            continue
        # On the meta device it has no values.
        if unwrapped.digest == EMPTY and 0 not in unwrapped.shape:
            continue
        if live.digest != unwrapped.digest:
            persistent = "persistent" if unwrapped.persistent else "non-persistent"
            yield (
                f"rank {snapshot.rank}: buffer {unwrapped.name!r} ({persistent}) "
                "has other values after build than in the unwrapped model"
            )


def _live_parameters(expected: _ExpectedNames, snapshot: Snapshot) -> Iterator[str]:
    """Yield findings for live parameters with names or shapes that the model does not have."""
    where = f"rank {snapshot.rank}"
    if snapshot.model is None:
        yield f"{where}: no model to read names from"
        return
    if flat_parameters((snapshot,)):
        return  # flat parameters have no names of their own; the files have
    live_by_name: dict[str, list[str]] = defaultdict(list)
    for info in snapshot.parameters:
        name = expected.unwrapped_name(info.name)
        live_by_name[name].append(info.name)
    for name in sorted(live_by_name.keys() - expected.parameters):
        last_live = live_by_name[name][-1]
        yield (
            f"{where}: live parameter {last_live!r} maps to {name!r}, "
            "which is no name of the unwrapped model"
        )
    for name in sorted(live_by_name):
        count = len(live_by_name[name])
        if count > 1:
            yield f"{where}: {count} live parameters map to {name!r}; expected one"
    for info in snapshot.parameters:
        # A shard of FSDP1 has only its own shape.
        if info.kind == "FSDP1 shard":
            continue
        shape = expected.shape(info.name)
        live_shape = tuple(info.shape)
        if shape not in {None, live_shape}:
            yield (
                f"{where}: live parameter {info.name!r} has shape {info.shape}; "
                f"{shape} in the unwrapped model"
            )


def _without_live_counterpart(expected: _ExpectedNames, run: RunTrace) -> Iterator[str]:
    """Yield findings for what no rank of a copy of the model has.

    A copy is held by one rank, or by the ranks of one pipeline.
    """
    trained: dict[int, Snapshot] = {}
    for snapshot in run.trained:
        if snapshot.model:
            trained[snapshot.rank] = snapshot
    built = {snapshot.rank: snapshot for snapshot in run.at("build")}
    expected_buffers = expected.first_names_of(expected.unwrapped.buffers)
    expert_groups = [_ranks_with_its_experts(snapshot) for snapshot in trained.values()]
    for ranks in across_stages(run, expert_groups):
        parameters: list[ParameterInfo] = []
        for snapshot in _of_ranks(trained, ranks):
            parameters += snapshot.parameters
        buffers: list[ParameterInfo] = []
        for snapshot in _of_ranks(built, ranks):
            buffers += snapshot.buffers
        where = named_ranks(ranks, 0)
        problem = "of the unwrapped model has no live counterpart"
        if len(ranks) > 1:
            problem += " on any stage"
        kinds = {info.kind for info in parameters}
        # Flat parameters have no names of their own.
        if "FlatParameter" not in kinds:
            for name in _absent(expected, expected.parameters, parameters):
                yield f"{where}: parameter {name!r} {problem}"
        for name in _absent(expected, expected_buffers, buffers):
            yield f"{where}: buffer {name!r} {problem}"


def _of_ranks(snapshots: Mapping[int, Snapshot], ranks: Iterable[int]) -> list[Snapshot]:
    """Return the snapshots of some ranks, without ranks that have none."""
    return [snapshots[rank] for rank in ranks if rank in snapshots]


def _absent(expected: _ExpectedNames, names: set[str], live: Iterable[ParameterInfo]) -> list[str]:
    """Return the names that none of the live tensors has, sorted."""
    return sorted(names - expected.unwrapped_names_of(live))


def _ranks_with_its_experts(snapshot: Snapshot) -> tuple[int, ...]:
    """Return the ranks that hold all experts together with this one, itself included."""
    ranks = {snapshot.rank}
    for info in snapshot.parameters:
        if expert_parts(info) > 1:
            ranks.update(info.layout.holders)
    return tuple(sorted(ranks))


def _optimizer_state(expected: _ExpectedNames, trained: Snapshots) -> Iterator[str]:
    """Yield findings for names of optimizer state, over all ranks together.

    A rank has no state for a parameter of which it holds no element.
    """
    owners: set[str] = set()
    for snapshot in trained:
        if snapshot.optimizer is None:
            yield f"rank {snapshot.rank}: no optimizer to read names from"
            return
        owners |= _state_owners(snapshot, snapshot.optimizer)
    # Flat parameters have no names of their own.
    if flat_parameters(trained) or not _has_state(trained):
        return
    if _state_under_one_parameter(trained):
        return
    names = {expected.unwrapped_name(owner) for owner in owners}
    for name in sorted(expected.updated - names):
        yield f"the optimizer of no rank keeps state for {name!r}"
    for name in sorted(names - expected.trainable):
        yield (
            f"the optimizer keeps state for {name!r}, "
            "which is no trainable parameter of the unwrapped model"
        )


def _state_owners(snapshot: Snapshot, optimizer: OptimizerInfo) -> set[str]:
    """Return the live names of parameters with state on this rank, in flat partitions too."""
    owners: set[str] = set()
    for state in snapshot.states:
        if not state.owner.startswith("partition "):
            owners.add(state.owner)
    for name, numel in optimizer.partitioned.items():
        if numel:
            owners.add(name)
    return owners


def _has_state(snapshots: Snapshots) -> bool:
    """Tell whether any rank's optimizer keeps state; SGD without momentum keeps none."""
    for snapshot in snapshots:
        optimizer = snapshot.optimizer
        if optimizer and (optimizer.states or optimizer.partitioned):
            return True
    return False


def _state_under_one_parameter(snapshots: Snapshots) -> bool:
    """Tell whether the optimizer keeps all state under one parameter, as LBFGS does.

    That state is larger than its owner.
    """
    for snapshot in snapshots:
        numel_by_name = {info.name: info.local_numel for info in snapshot.parameters}
        for state in snapshot.states:
            owner_numel = numel_by_name.get(state.owner)
            if owner_numel is None:
                continue
            if state.numel > max(1, owner_numel):
                return True
    return False


def _checkpoint(expected: _ExpectedNames, files: list[FileInfo], run: RunTrace) -> Iterator[str]:
    """Yield findings for keys of saved files, and for names that no file holds.

    Of a model with an adapter only the adapter's names are expected.
    """
    yield from _keys(expected, files)
    in_models: set[str] = set()
    in_optimizers: set[str] = set()
    for file in files:
        if file.holds == "model":
            in_models |= expected.names_in(file)
        elif file.holds != "index":
            in_optimizers |= expected.names_in(file)
    yield from _missing_of_model(expected, in_models, run)
    if not in_models:
        yield NO_READABLE_FILE
    if in_optimizers:  # empty where the optimizer's state is saved by number instead of by name
        yield from _missing(
            "trainable parameters' optimizer states", expected.updated, in_optimizers
        )


def _missing_of_model(expected: _ExpectedNames, saved: set[str], run: RunTrace) -> Iterator[str]:
    """Yield findings for parameters and persistent buffers that no file of a model holds."""
    kind = "parameters"
    parameters = expected.in_files
    buffers = expected.persistent
    if expected.cell.option("lora"):
        parameters = expected.trainable
        buffers = set()
    if expected.written_by_library(saved) and not parameters <= saved:
        kind = "names that the library writes"
        parameters = {expected.first_name(name) for name in expected.written}
        buffers = set()
    for text in _missing(kind, parameters, saved):
        holders = _only_holders(expected, run, expected.in_files - saved)
        if not holders:
            yield text
            continue
        where = named_stage(run, holders)
        verb = "holds" if len(holders) == 1 else "hold"
        yield f"{text}; {where} alone {verb} them"
    yield from _missing("persistent buffers", buffers, saved)


def _missing(kind: str, names: set[str], saved: set[str]) -> Iterator[str]:
    """Yield a finding for the names that no file holds."""
    missing = sorted(names - saved)
    count = len(missing)
    if count:
        first = first_three(missing)
        yield f"{count} of {len(names)} {kind} are in no saved file, first {first}"


def _only_holders(expected: _ExpectedNames, run: RunTrace, names: set[str]) -> list[int]:
    """Return the ranks whose stage alone holds all parameters of these names.

    Empty if another stage holds some of them.
    """
    if not stages_of(run):
        return []
    holders: list[int] = []
    for snapshot in run.at("build"):
        live_names = expected.unwrapped_names_of(snapshot.parameters)
        if live_names.isdisjoint(names):
            continue
        if not names <= live_names:
            return []
        holders.append(snapshot.rank)
    return holders


def _keys(expected: _ExpectedNames, files: list[FileInfo]) -> Iterator[str]:
    """Yield a finding for each key that is no name of the unwrapped model.

    Likewise for a key whose tensor has another shape.
    """
    models = []
    for file in files:
        if file.holds == "model":
            models.append(file)
    # Beside the model's there may be files of other tensors: random states, statistics of the data.
    of_model = []
    for file in models:
        if expected.has_key_of_model(file):
            of_model.append(file)
    if not of_model:
        of_model = models
    for file in files:
        if file.holds == "optimizer" or file in of_model:
            for text in _keys_of_file(expected, file):
                yield f"file {file.path!r}: {text}"


def _keys_of_file(expected: _ExpectedNames, file: FileInfo) -> Iterator[str]:
    """Yield what is wrong with the keys of one file: what several have in common is said once."""
    in_groups: set[str] = set()
    for group in expected.renamed_in(file):
        in_groups.update(group.names)
        first = min(group.names)
        name = group.names[first]
        yield (
            f"{group}: key {first!r} is no name of the unwrapped model; "
            f"expected {name!r}{group.way_out}"
        )
    known = expected.known_in(file)
    renamed_by_library = expected.written_by_library(file.keys)
    for key in file.keys:
        if key in in_groups:
            continue
        if key not in known:
            yield _unknown_key(expected, key, known)
        elif not renamed_by_library:
            # Where the library renames keys, a name may be the model's own of another tensor.
            yield from _other_shape(expected, file, key)


def _unknown_key(expected: _ExpectedNames, key: str, known: set[str]) -> str:
    """Return what is wrong with a key that is none of the ``known`` names of its file."""
    if key in expected.not_persistent:
        return f"holds {key!r}, a buffer that is not persistent"
    unknown = f"key {key!r} is no name of the unwrapped model"
    closest = expected.unwrapped_name(key)
    if closest in known:
        return f"{unknown}; expected {closest!r}"
    return unknown


def _other_shape(expected: _ExpectedNames, file: FileInfo, key: str) -> Iterator[str]:
    """Yield a finding if the tensor under a key has another shape than in the unwrapped model."""
    if key not in file.shapes:
        return
    saved_shape = tuple(file.shapes[key])
    shape = expected.shape(key)
    # Extra state is in the state dict without being a parameter or a buffer, so its shape is not
    # known.
    if shape is not None and saved_shape != shape:
        yield f"{key!r} has shape {saved_shape}; {shape} in the unwrapped model"
