"""Do parameter names map, in memory, in the optimizer and in every saved file?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.checks._values import adapter_name, flat_parameters
from pytest_distcompat.digests import EMPTY
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import FileInfo, Snapshot, Trace, UnwrappedInfo


@check(scenario=TRAIN, until=(("train", "files", 0),), order=1)
def names(cell: Cell, trace: Trace) -> Iterator[str]:
    """Live names, without the segments of the cell's own wrappers, equal the unwrapped model's, one to one; so do the names
    under which the optimizer keeps state; and every key in every saved file is a unwrapped name, with nothing to take off.
    Under each name stands a tensor of the plain shape, and no parameter or persistent buffer is in no file. That goes for
    checkpoints, those of single steps too, and for what is exported at the end. Building leaves every buffer its values, and
    no file holds one that is not persistent. An adapter may be saved without the model below it, and then as PEFT names
    it, without the adapter's own name (https://huggingface.co/docs/peft/developer_guides/checkpoint).

    If it fails: look for the segment that is too many (``_orig_mod``, ``module``, ``_fsdp_wrapped_module``,
    ``_checkpoint_wrapped_module``) and for what saved it without ``get_model_state_dict``, which takes them off
    (https://pytorch.org/docs/stable/distributed.checkpoint.html#torch.distributed.checkpoint.state_dict.get_model_state_dict).
    Where live names alone have the segment of a wrapper of the trainer's own, ``self.model`` of the driver is to be what is
    inside it.
    """
    run = trace.run()
    first = run.first("build_model")
    if first is None or first.unwrapped is None:
        yield "the unwrapped model was not seen"
        return
    oracle = _Oracle(cell, first.unwrapped)
    for snapshot in run.at("build"):
        yield from oracle.buffers(snapshot)
    for snapshot in (trained := run.at("step", 2)):
        yield from oracle.live(snapshot)
    yield from every_rank(trained, cell.world_size, "three steps")
    yield from oracle.optimizer(trained)
    places = sorted({snapshot.index for snapshot in run.snapshots if snapshot.action == "files"})
    written = [tuple(file for snapshot in run.at_index(place) for file in snapshot.files) for place in places]
    if written or trace.saves:
        yield from oracle.files(written[0] if written else ())
    for files in written[1:]:
        yield from oracle.keys(files)


#: What ``probe.read_files`` reads, for those who save otherwise.
READ = (
    "no file holds a model by names; read are .safetensors, torch.distributed.checkpoint, DeepSpeed's, and what torch.save wrote "
    "(.pt, .pth, .bin, .ckpt, .tar): a state dict by itself, or under 'model', 'model_state_dict', 'state_dict', 'model_state' "
    "or 'module'"
)


class _Oracle:
    """The unwrapped model's names, tied ones as one."""

    def __init__(self, cell: Cell, unwrapped: UnwrappedInfo) -> None:
        self.cell, self.unwrapped = cell, unwrapped
        self.strategy = STRATEGIES.get(cell.strategy)
        self.one: Mapping[str, str] = {name: group[0] for group in unwrapped.tied for name in group}
        self.parameters = {self.same(info.name) for info in unwrapped.parameters}
        self.trainable = {self.same(info.name) for info in unwrapped.parameters if info.trainable}
        self.saved = set(unwrapped.state_dict)
        self.shapes = {info.name: tuple(info.shape) for info in (*unwrapped.parameters, *unwrapped.buffers)}
        self.kept = {info.name for info in unwrapped.buffers if info.placement == "persistent"}
        self.loose = {info.name for info in unwrapped.buffers} - self.kept
        if cell.option("lora"):
            self.one = {**self.one, **{adapter_name(name): name for name in self.trainable}}
            self.saved |= set(self.one)

    def same(self, name: str) -> str:
        """The first of the names that are tied to this one, or are other names for it; the name itself if none is."""
        return self.one.get(name, name)

    def canonical(self, name: str) -> str:
        return self.same(self.strategy.canonical(name, self.cell, self.saved | self.parameters))

    def live(self, snapshot: Snapshot) -> Iterator[str]:
        where = f"rank {snapshot.rank}"
        if snapshot.model is None:
            yield f"{where}: no model to read names from"
            return
        if flat_parameters((snapshot,)):
            return  # one flat parameter a unit has no names of its own; the files have
        found = Counter(self.canonical(info.name) for info in snapshot.model.parameters)
        raw = {self.canonical(info.name): info.name for info in snapshot.model.parameters}
        for name in sorted(set(found) - self.parameters):
            yield f"{where}: live parameter {raw[name]!r} maps to {name!r}, which is no name of the unwrapped model"
        for name in sorted(self.parameters - set(found)):
            yield f"{where}: parameter {name!r} of the unwrapped model has no live counterpart"
        for name in sorted(name for name, count in found.items() if count > 1):
            yield f"{where}: {found[name]} live parameters map to {name!r}; expected one"
        for info in snapshot.model.parameters:
            expected = self.shape(info.name)
            # A shard of FSDP1 has only its own shape.
            if info.kind != "FSDP1 shard" and expected not in {None, tuple(info.shape)}:
                yield f"{where}: live parameter {info.name!r} has shape {info.shape}; {expected} in the unwrapped model"

    def buffers(self, snapshot: Snapshot) -> Iterator[str]:
        """After build, before anything may have changed them; one in another dtype is the dtypes' business."""
        where, live = f"rank {snapshot.rank}", snapshot.model.buffers if snapshot.model else ()
        found = {self.canonical(info.name): info for info in live}
        for unwrapped in self.unwrapped.buffers:
            info = found.get(self.same(unwrapped.name))
            if info is None:
                yield f"{where}: buffer {unwrapped.name!r} of the unwrapped model has no live counterpart"
            elif unwrapped.digest == EMPTY and 0 not in unwrapped.shape:
                continue  # on the meta device it had no values yet
            elif info.dtype == unwrapped.dtype and info.digest != unwrapped.digest:
                which = f"buffer {unwrapped.name!r} ({unwrapped.placement})"
                yield f"{where}: {which} has other values after build than in the unwrapped model"

    def shape(self, name: str) -> tuple[int, ...] | None:
        """That of the plain parameter or buffer; None if there is none."""
        return self.shapes.get(self.canonical(name))

    def optimizer(self, trained: tuple[Snapshot, ...]) -> Iterator[str]:
        """Over all ranks together: a rank has no state of a parameter of which it holds no element."""
        owners: set[str] = set()
        for snapshot in trained:
            if snapshot.optimizer is None:
                yield f"rank {snapshot.rank}: no optimizer to read names from"
                return
            owners |= {state.owner for state in snapshot.optimizer.states if not state.owner.startswith("partition ")}
            owners |= {name for name, numel in snapshot.optimizer.partitioned.items() if numel}
        if flat_parameters(trained) or not _has_state(trained) or _kept_together(trained):
            return
        found = {self.canonical(name) for name in owners}
        for name in sorted(self.trainable - found):
            yield f"the optimizer of no rank keeps state for {name!r}"
        for name in sorted(found - self.trainable):
            yield f"the optimizer keeps state for {name!r}, which is no trainable parameter of the unwrapped model"

    def files(self, files: tuple[FileInfo, ...]) -> Iterator[str]:
        """Keys, and what no file holds; of a model with an adapter, only the adapter must be there."""
        yield from self.keys(files)
        covered: set[str] = set()
        optimized: set[str] = set()
        for file in files:
            (covered if file.holds == "model" else optimized).update(self.same(key) for key in file.keys)
        adapted = bool(self.cell.option("lora"))
        yield from _missing("parameters", self.trainable if adapted else self.parameters, covered)
        yield from _missing("persistent buffers", set() if adapted else self.kept, covered)
        if not covered:
            yield READ
        if optimized:  # some number their parameters; then there are no names to miss
            yield from _missing("trainable parameters' optimizer states", self.trainable, optimized)

    def keys(self, files: tuple[FileInfo, ...]) -> Iterator[str]:
        """Every key is a unwrapped name, with a tensor of the plain shape."""
        for file in files:
            known = self.saved | self.parameters if file.holds == "model" else self.trainable | set(self.one)
            for key in file.keys:
                if key in self.loose and key not in known:
                    yield f"file {file.path!r}: holds {key!r}, a buffer that is not persistent"
                elif key not in known:
                    closest = self.canonical(key)
                    hint = f"; expected {closest!r}" if closest in known else ""
                    yield f"file {file.path!r}: key {key!r} is no name of the unwrapped model{hint}"
                elif key in file.shapes:
                    found, expected = tuple(file.shapes[key]), self.shape(key)
                    # Extra state is in the plain state dict and is neither parameter nor buffer: it has no plain shape.
                    if expected is not None and found != expected:
                        yield f"file {file.path!r}: {key!r} has shape {found}; {expected} in the unwrapped model"


def _has_state(snapshots: tuple[Snapshot, ...]) -> bool:
    """Whether any rank's optimizer keeps anything: SGD without momentum does not."""
    return any(one.optimizer.states or one.optimizer.partitioned for one in snapshots if one.optimizer)


def _kept_together(snapshots: tuple[Snapshot, ...]) -> bool:
    """Whether an optimizer keeps the state of all parameters under one of them, as ``torch.optim.LBFGS`` does under the first.

    Then a tensor of it has more elements than its owner.
    """
    for snapshot in snapshots:
        if snapshot.model is not None and snapshot.optimizer is not None:
            sizes = {info.name: info.local_numel for info in snapshot.model.parameters}
            if any(state.numel > max(1, sizes.get(state.owner, state.numel)) for state in snapshot.optimizer.states):
                return True
    return False


def _missing(what: str, wanted: set[str], covered: set[str]) -> Iterator[str]:
    missing = sorted(wanted - covered)
    if missing:
        names = ", ".join(repr(name) for name in missing[:3])
        yield f"{len(missing)} of {len(wanted)} {what} stand in no saved file, first {names}"
