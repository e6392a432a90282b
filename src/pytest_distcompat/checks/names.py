"""Are parameter names those of the unwrapped model, in memory, in the optimizer and in every saved file?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import and_others, check, every_rank, first_three, named_ranks
from pytest_distcompat.checks._renamed import Renamed, renamed
from pytest_distcompat.checks._values import (
    across_stages,
    adapter_name,
    expert_parts,
    flat_parameters,
    named_stage,
    stages_of,
    unused,
    values,
)
from pytest_distcompat.cost import BYTES
from pytest_distcompat.digests import EMPTY
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import FileInfo, RunTrace, Snapshot, Trace, UnwrappedInfo


@check(scenario=TRAIN, until=(("train", "files", 0),), order=1)
def names(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that names and shapes are those of the unwrapped model, in memory and in every saved file.

    Optimizer state has these names too. A file has every parameter and persistent buffer, or all names that the model's library
    writes in place of them. Building keeps the values of buffers; ranks whose ``build_model`` gave other values have those of
    rank 0 after it. An adapter may have PEFT's names
    (https://huggingface.co/docs/peft/developer_guides/checkpoint).

    If it fails: look for an extra segment (``_orig_mod``, ``module``, ``_checkpoint_wrapped_module``) and save with
    ``get_model_state_dict``, which removes it. For a wrapper of the trainer's own set ``self.model`` to the model
    inside it.
    """
    run = trace.run()
    if run.unwrapped is None:
        yield "the unwrapped model was not recorded"
        return
    expected = _Expected(cell, run.unwrapped, unused(run))
    yield from _unlike_from_the_start(cell, run)
    for snapshot in run.at("build"):
        yield from expected.buffers(snapshot)
    for snapshot in (trained := run.trained):
        yield from expected.live(snapshot)
    yield from expected.everywhere(run)
    yield from every_rank(trained, cell.world_size, "three steps")
    yield from expected.optimizer(trained)
    indices = run.indices("files")
    written = [tuple(file for snapshot in run.at_index(index) for file in snapshot.files) for index in indices]
    if written or (trace.saves and not run.simulated):
        yield from expected.files(written[0] if written else (), run)
    for files in written[1:]:
        yield from expected.keys(files)


def _unlike_from_the_start(cell: Cell, run: RunTrace) -> Iterator[str]:
    """Yield a finding if ranks were given unlike models and what they hold together is not the model of rank 0.

    DDP sends rank 0's to all; of FSDP2 each shard is of another model then, and no rank can see it.
    """
    digests: dict[str, dict[int, str]] = defaultdict(dict)
    for snapshot in run.at("build_model"):
        for info in snapshot.unwrapped.parameters if snapshot.unwrapped else ():
            # On the meta device it has no values, and one that was cut while it was loaded has a part of them.
            if info.digest not in {"", EMPTY} and info.local_numel == math.prod(info.shape):
                digests[info.name][snapshot.rank] = info.digest
    unlike = {name for name, of_ranks in digests.items() if 0 in of_ranks and len({*of_ranks.values()}) > 1}
    # Experts of DeepSpeed are each rank's own.
    if not unlike or cell.option("ep") != 1:
        return
    built = values(run, run.at("build"))
    held, dtypes = built.of("parameter"), built.dtypes.get("parameter", {})
    given = {info.name: info.dtype for info in (run.unwrapped.parameters if run.unwrapped else ())}
    wrong = {
        name
        for name in unlike & held.keys()
        # Rounded values say nothing.
        if all(BYTES.get(dtype, 0) >= BYTES.get(given[name], 4) for dtype in dtypes[name])
        and held[name] != (digests[name][0],)
    }
    if wrong:
        found = (
            f"build_model() gives each rank other values of {and_others(wrong)}, and build() not those of rank 0 to all"
        )
        yield f"{found}: ranks hold parts of unlike models; seed all alike, or broadcast"


#: The finding when no saved file is one that ``probe.files`` can read.
NO_READABLE_FILE = (
    "no file holds a model by names; read are .safetensors, torch.distributed.checkpoint, DeepSpeed's, and what torch.save wrote "
    "(.pt, .pth, .bin, .ckpt, .tar): a state dict by itself, or under 'model', 'model_state_dict', 'state_dict', 'model_state' "
    "or 'module'"
)


class _Expected:
    """Names and shapes of the unwrapped model, one name for tied parameters: what live and saved ones must be."""

    def __init__(self, cell: Cell, unwrapped: UnwrappedInfo, unused: frozenset[str]) -> None:
        self.cell, self.unwrapped = cell, unwrapped
        self.strategy = STRATEGIES.get(cell.strategy)
        self.first_of: Mapping[str, str] = {name: group[0] for group in unwrapped.tied for name in group}
        self.parameters = {self.same(info.name) for info in unwrapped.parameters}
        self.trainable = {self.same(info.name) for info in unwrapped.parameters if info.trainable}
        self.saved = set(unwrapped.state_dict)
        self.shapes = {info.name: tuple(info.shape) for info in (*unwrapped.parameters, *unwrapped.buffers)}
        self.persistent = {info.name for info in unwrapped.buffers if info.persistent}
        self.not_persistent = {info.name for info in unwrapped.buffers} - self.persistent
        if cell.option("lora"):
            self.first_of = {**self.first_of, **{adapter_name(name): name for name in self.trainable}}
            self.saved |= set(self.first_of)
        # A hook of the model may save a parameter under other names, as torchtitan's does for fused projections.
        own = {self.same(name) for name in unwrapped.state_dict if not name.endswith("_extra_state")}
        renamed = self.parameters - own if own else set()
        others = own - self.parameters - {self.same(info.name) for info in unwrapped.buffers} if renamed else set()
        self.in_files = self.parameters - renamed | others
        self.written = set(unwrapped.written_names)
        # An optimizer has no state of those for which it never got a gradient.
        self.updated = self.trainable - set(map(self.canonical, unused))

    def same(self, name: str) -> str:
        """Return the first name of the same tensor, tied or PEFT's; the name itself if there is no other."""
        return self.first_of.get(name, name)

    def canonical(self, name: str) -> str:
        return self.same(self.strategy.canonical(name, self.cell, self.saved | self.parameters))

    def live(self, snapshot: Snapshot) -> Iterator[str]:
        where = f"rank {snapshot.rank}"
        if snapshot.model is None:
            yield f"{where}: no model to read names from"
            return
        if flat_parameters((snapshot,)):
            return  # flat parameters have no names of their own; the files have
        found: dict[str, list[str]] = defaultdict(list)
        for info in snapshot.parameters:
            found[self.canonical(info.name)].append(info.name)
        for name in sorted(set(found) - self.parameters):
            yield f"{where}: live parameter {found[name][-1]!r} maps to {name!r}, which is no name of the unwrapped model"
        for name, live in sorted(found.items()):
            if len(live) > 1:
                yield f"{where}: {len(live)} live parameters map to {name!r}; expected one"
        for info in snapshot.parameters:
            expected = self.shape(info.name)
            # A shard of FSDP1 has only its own shape.
            if info.kind != "FSDP1 shard" and expected not in {None, tuple(info.shape)}:
                yield f"{where}: live parameter {info.name!r} has shape {info.shape}; {expected} in the unwrapped model"

    def everywhere(self, run: RunTrace) -> Iterator[str]:
        """Yield findings for what no rank of a copy of the model has: one rank, or those of one pipeline."""
        snapshots = {snapshot.rank: snapshot for snapshot in run.trained if snapshot.model}
        built = {snapshot.rank: snapshot for snapshot in run.at("build")}
        for ranks in across_stages(run, (_with_experts(one) for one in snapshots.values())):
            live = [info for rank in ranks if rank in snapshots for info in snapshots[rank].parameters]
            buffers = [info for rank in ranks if rank in built for info in built[rank].buffers]
            flat = any(info.kind == "FlatParameter" for info in live)
            stage = " on any stage" if len(ranks) > 1 else ""
            for kind, infos, wanted in (
                ("parameter", live, set() if flat else self.parameters),
                ("buffer", buffers, {self.same(info.name) for info in self.unwrapped.buffers}),
            ):
                for name in sorted(wanted - {self.canonical(info.name) for info in infos}):
                    text = f"{kind} {name!r} of the unwrapped model has no live counterpart{stage}"
                    yield f"{named_ranks(ranks, 0)}: {text}"

    def buffers(self, snapshot: Snapshot) -> Iterator[str]:
        """Yield findings for buffers right after build; the check ``dtypes`` covers a buffer in another dtype."""
        found = {self.canonical(info.name): info for info in snapshot.buffers}
        for unwrapped in self.unwrapped.buffers:
            info = found.get(self.same(unwrapped.name))
            # On the meta device it has no values.
            known = unwrapped.digest != EMPTY or 0 in unwrapped.shape
            if info and known and info.dtype == unwrapped.dtype and info.digest != unwrapped.digest:
                buffer = f"buffer {unwrapped.name!r} ({'' if unwrapped.persistent else 'non-'}persistent)"
                yield f"rank {snapshot.rank}: {buffer} has other values after build than in the unwrapped model"

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the unwrapped parameter or buffer; None if there is none of that name."""
        return self.shapes.get(self.canonical(name))

    def optimizer(self, trained: tuple[Snapshot, ...]) -> Iterator[str]:
        """Yield findings over all ranks together: a rank has no state for a parameter of which it holds no element."""
        owners: set[str] = set()
        for snapshot in trained:
            if snapshot.optimizer is None:
                yield f"rank {snapshot.rank}: no optimizer to read names from"
                return
            owners |= {state.owner for state in snapshot.optimizer.states if not state.owner.startswith("partition ")}
            owners |= {name for name, numel in snapshot.optimizer.partitioned.items() if numel}
        if flat_parameters(trained) or not _has_state(trained) or _state_under_one_parameter(trained):
            return
        found = {self.canonical(name) for name in owners}
        for name in sorted(self.updated - found):
            yield f"the optimizer of no rank keeps state for {name!r}"
        for name in sorted(found - self.trainable):
            yield f"the optimizer keeps state for {name!r}, which is no trainable parameter of the unwrapped model"

    def files(self, files: tuple[FileInfo, ...], run: RunTrace) -> Iterator[str]:
        """Yield findings for keys, and for names that no file holds; of a model with an adapter only the adapter's."""
        yield from self.keys(files)
        covered: set[str] = set()
        optimized: set[str] = set()
        for file in (one for one in files if one.holds != "index"):
            (covered if file.holds == "model" else optimized).update(self.same(key) for key in self.names_in(file))
        adapted, kind = bool(self.cell.option("lora")), "parameters"
        wanted, buffers = (self.trainable, set[str]()) if adapted else (self.in_files, self.persistent)
        if covered & self.written - self.saved and not wanted <= covered:
            kind, wanted, buffers = "names that the library writes", set(map(self.same, self.written)), set()
        for text in _missing(kind, wanted, covered):
            ranks = self._only_holders(run, self.in_files - covered)
            yield f"{text}; {named_stage(run, ranks)} alone hold{'s' * (len(ranks) == 1)} them" if ranks else text
        yield from _missing("persistent buffers", buffers, covered)
        if not covered:
            yield NO_READABLE_FILE
        if optimized:  # empty where the optimizer's state is saved by number instead of by name
            yield from _missing("trainable parameters' optimizer states", self.updated, optimized)

    def _only_holders(self, run: RunTrace, names: set[str]) -> list[int]:
        """Return the ranks whose stage holds all parameters of these names, where other stages hold none of them."""
        held = {one.rank: {self.canonical(info.name) for info in one.parameters} for one in run.at("build")}
        some = [rank for rank, live in held.items() if live & names] if stages_of(run) else []
        return some if all(names <= held[rank] for rank in some) else []

    def of_the_model(self, key: str) -> bool:
        """Tell whether the key is a name of the unwrapped model, perhaps with more before it or in it, or cut off in front."""
        known = self.saved | self.parameters | self.written | self.not_persistent
        segments = key.split(".")
        ends = (".".join(segments[nth:]) for nth in range(len(segments)))
        cut_off = any(name.endswith(f".{key}") for name in known)
        return self.canonical(key) in known or not known.isdisjoint(ends) or cut_off

    def known(self, file: FileInfo) -> set[str]:
        """Return the names that the file may have."""
        if file.holds == "model":
            return self.saved | self.parameters | self.written
        return self.trainable | set(self.first_of)

    def names_in(self, file: FileInfo) -> Iterator[str]:
        """Yield the keys of the file, and the model's own names for those that it has under others."""
        yield from file.keys
        for group in self.renamed(file):
            yield from group.names.values()

    def renamed(self, file: FileInfo) -> list[Renamed]:
        """Return the groups of unknown keys of the file that have, or lack, the same part of a name."""
        known = self.known(file)
        return renamed(set(file.keys) - known - self.not_persistent, known)

    def keys(self, files: tuple[FileInfo, ...]) -> Iterator[str]:
        """Yield a finding for each key that is no name of the unwrapped model, or whose tensor has another shape."""
        models = [file for file in files if file.holds == "model"]
        # Beside the model's there may be files of other tensors: random states, statistics of the data.
        about = [file for file in models if any(map(self.of_the_model, file.keys))] or models
        for file in (one for one in files if one.holds == "optimizer" or one in about):
            known = self.known(file)
            # Then a name may be the model's own of another tensor.
            renamed = bool(self.written & set(file.keys) - self.saved)
            groups = self.renamed(file)
            for group in groups:
                first = min(group.names)
                unknown = f"{group}: key {first!r} is no name of the unwrapped model; expected {group.names[first]!r}"
                yield f"file {file.path!r}: {unknown}{group.way_out}"
            grouped = {key for group in groups for key in group.names}
            for key in (one for one in file.keys if one not in grouped):
                if key in self.not_persistent and key not in known:
                    yield f"file {file.path!r}: holds {key!r}, a buffer that is not persistent"
                elif key not in known:
                    closest = self.canonical(key)
                    hint = f"; expected {closest!r}" if closest in known else ""
                    yield f"file {file.path!r}: key {key!r} is no name of the unwrapped model{hint}"
                elif key in file.shapes and not renamed:
                    found, expected = tuple(file.shapes[key]), self.shape(key)
                    # Extra state is in the state dict without being a parameter or a buffer, so its shape is not known.
                    if expected is not None and found != expected:
                        yield f"file {file.path!r}: {key!r} has shape {found}; {expected} in the unwrapped model"


def _with_experts(snapshot: Snapshot) -> tuple[int, ...]:
    """Return the ranks that hold all experts together with this one, itself included."""
    peers = {rank for info in snapshot.parameters if expert_parts(info) > 1 for rank in info.layout.holders}
    return tuple(sorted({snapshot.rank, *peers}))


def _has_state(snapshots: tuple[Snapshot, ...]) -> bool:
    """Tell whether any rank's optimizer keeps state; SGD without momentum keeps none."""
    return any(one.optimizer.states or one.optimizer.partitioned for one in snapshots if one.optimizer)


def _state_under_one_parameter(snapshots: tuple[Snapshot, ...]) -> bool:
    """Tell whether the optimizer keeps all state under one parameter, as LBFGS does: it is larger than its owner."""
    sizes = {(one.rank, info.name): info.local_numel for one in snapshots for info in one.parameters}
    states = ((sizes.get((one.rank, state.owner)), state.numel) for one in snapshots for state in one.states)
    return any(size is not None and numel > max(1, size) for size, numel in states)


def _missing(kind: str, wanted: set[str], covered: set[str]) -> Iterator[str]:
    if missing := sorted(wanted - covered):
        yield f"{len(missing)} of {len(wanted)} {kind} are in no saved file, first {first_three(missing)}"
