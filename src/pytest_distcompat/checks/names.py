"""Do parameter names map, in memory, in the optimizer and in every saved file?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.checks._values import flat_parameters
from pytest_distcompat.digests import EMPTY
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import FileFact, Moment, PlainFact, Trace


@check(scenario=TRAIN, until=(("train", "files", 0),), order=1)
def names(cell: Cell, trace: Trace) -> Iterator[str]:
    """Live names, without the segments of the cell's own wrappers, equal the plain model's, one to one; so do the names
    under which the optimizer keeps state; and every key in every saved file is a plain name, with nothing to take off.
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
    life = trace.life()
    first = life.first("plain")
    if first is None or first.plain is None:
        yield "the plain model was not seen"
        return
    oracle = _Oracle(cell, first.plain)
    for moment in life.at("build"):
        yield from oracle.buffers(moment)
    for moment in (trained := life.at("step", 2)):
        yield from oracle.live(moment)
    yield from every_rank(trained, cell.world_size, "three steps")
    yield from oracle.optimizer(trained)
    places = sorted({moment.index for moment in life.moments if moment.verb == "files"})
    written = [tuple(file for moment in life.at_index(place) for file in moment.files) for place in places]
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


def adapter_name(name: str) -> str:
    """Return the key under which PEFT saves a parameter of an adapter; the loader gives it the adapter's name anew.

    Layers that are trained as a whole beside it (``modules_to_save``) are saved under the names that they had before.
    """
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".")


class _Oracle:
    """The plain model's names, tied ones as one."""

    def __init__(self, cell: Cell, plain: PlainFact) -> None:
        self.cell, self.plain = cell, plain
        self.strategy = STRATEGIES.get(cell.strategy)
        self.one: Mapping[str, str] = {name: group[0] for group in plain.tied for name in group}
        self.parameters = {self.same(fact.name) for fact in plain.parameters}
        self.trainable = {self.same(fact.name) for fact in plain.parameters if fact.trainable}
        self.saved = set(plain.state_dict)
        self.shapes = {fact.name: tuple(fact.shape) for fact in (*plain.parameters, *plain.buffers)}
        self.kept = {fact.name for fact in plain.buffers if fact.placement == "persistent"}
        self.loose = {fact.name for fact in plain.buffers} - self.kept
        if cell.option("adapter"):
            self.one = {**self.one, **{adapter_name(name): name for name in self.trainable}}
            self.saved |= set(self.one)

    def same(self, name: str) -> str:
        """The first of the names that are tied to this one, or are other names for it; the name itself if none is."""
        return self.one.get(name, name)

    def canonical(self, name: str) -> str:
        return self.same(self.strategy.canonical(name, self.cell, self.saved | self.parameters))

    def live(self, moment: Moment) -> Iterator[str]:
        where = f"rank {moment.rank}"
        if moment.model is None:
            yield f"{where}: no model to read names from"
            return
        if flat_parameters((moment,)):
            return  # one flat parameter a unit has no names of its own; the files have
        found = Counter(self.canonical(fact.name) for fact in moment.model.parameters)
        raw = {self.canonical(fact.name): fact.name for fact in moment.model.parameters}
        for name in sorted(set(found) - self.parameters):
            yield f"{where}: live parameter {raw[name]!r} maps to {name!r}, which is no name of the plain model"
        for name in sorted(self.parameters - set(found)):
            yield f"{where}: parameter {name!r} of the plain model has no live counterpart"
        for name in sorted(name for name, count in found.items() if count > 1):
            yield f"{where}: {found[name]} live parameters map to {name!r}; expected one"
        for fact in moment.model.parameters:
            expected = self.shape(fact.name)
            # A shard of FSDP1 has only its own shape.
            if fact.kind != "FSDP1 shard" and expected not in {None, tuple(fact.shape)}:
                yield f"{where}: live parameter {fact.name!r} has shape {fact.shape}; {expected} in the plain model"

    def buffers(self, moment: Moment) -> Iterator[str]:
        """After build, before anything may have changed them; one in another dtype is the dtypes' business."""
        where, live = f"rank {moment.rank}", moment.model.buffers if moment.model else ()
        found = {self.canonical(fact.name): fact for fact in live}
        for plain in self.plain.buffers:
            fact = found.get(self.same(plain.name))
            if fact is None:
                yield f"{where}: buffer {plain.name!r} of the plain model has no live counterpart"
            elif plain.digest == EMPTY and 0 not in plain.shape:
                continue  # on the meta device it had no values yet
            elif fact.dtype == plain.dtype and fact.digest != plain.digest:
                yield f"{where}: buffer {plain.name!r} ({plain.placement}) has other values after build than in the plain model"

    def shape(self, name: str) -> tuple[int, ...] | None:
        """That of the plain parameter or buffer; None if there is none."""
        return self.shapes.get(self.canonical(name))

    def optimizer(self, trained: tuple[Moment, ...]) -> Iterator[str]:
        """Over all ranks together: a rank has no state of a parameter of which it holds no element."""
        owners: set[str] = set()
        for moment in trained:
            if moment.optimizer is None:
                yield f"rank {moment.rank}: no optimizer to read names from"
                return
            owners |= {state.owner for state in moment.optimizer.states if not state.owner.startswith("partition ")}
            owners |= {name for name, numel in moment.optimizer.partitioned.items() if numel}
        if flat_parameters(trained) or not _has_state(trained) or _kept_together(trained):
            return
        found = {self.canonical(name) for name in owners}
        for name in sorted(self.trainable - found):
            yield f"the optimizer of no rank keeps state for {name!r}"
        for name in sorted(found - self.trainable):
            yield f"the optimizer keeps state for {name!r}, which is no trainable parameter of the plain model"

    def files(self, files: tuple[FileFact, ...]) -> Iterator[str]:
        """Keys, and what no file holds; of a model with an adapter, only the adapter must be there."""
        yield from self.keys(files)
        covered: set[str] = set()
        optimized: set[str] = set()
        for file in files:
            (covered if file.holds == "model" else optimized).update(self.same(key) for key in file.keys)
        adapted = bool(self.cell.option("adapter"))
        yield from _missing("parameters", self.trainable if adapted else self.parameters, covered)
        yield from _missing("persistent buffers", set() if adapted else self.kept, covered)
        if not covered:
            yield READ
        if optimized:  # some number their parameters; then there are no names to miss
            yield from _missing("trainable parameters' optimizer states", self.trainable, optimized)

    def keys(self, files: tuple[FileFact, ...]) -> Iterator[str]:
        """Every key is a plain name, with a tensor of the plain shape."""
        for file in files:
            known = self.saved | self.parameters if file.holds == "model" else self.trainable | set(self.one)
            for key in file.keys:
                if key in self.loose and key not in known:
                    yield f"file {file.path!r}: holds {key!r}, a buffer that is not persistent"
                elif key not in known:
                    closest = self.canonical(key)
                    hint = f"; expected {closest!r}" if closest in known else ""
                    yield f"file {file.path!r}: key {key!r} is no name of the plain model{hint}"
                elif key in file.shapes:
                    found, expected = tuple(file.shapes[key]), self.shape(key)
                    # Extra state is in the plain state dict and is neither parameter nor buffer: it has no plain shape.
                    if expected is not None and found != expected:
                        yield f"file {file.path!r}: {key!r} has shape {found}; {expected} in the plain model"


def _has_state(moments: tuple[Moment, ...]) -> bool:
    """Whether any rank's optimizer keeps anything: SGD without momentum does not."""
    return any(one.optimizer.states or one.optimizer.partitioned for one in moments if one.optimizer)


def _kept_together(moments: tuple[Moment, ...]) -> bool:
    """Whether an optimizer keeps the state of all parameters under one of them, as ``torch.optim.LBFGS`` does under the first.

    Then a tensor of it has more elements than its owner.
    """
    for moment in moments:
        if moment.model is not None and moment.optimizer is not None:
            sizes = {fact.name: fact.local_numel for fact in moment.model.parameters}
            if any(state.numel > max(1, sizes.get(state.owner, state.numel)) for state in moment.optimizer.states):
                return True
    return False


def _missing(what: str, wanted: set[str], covered: set[str]) -> Iterator[str]:
    missing = sorted(wanted - covered)
    if missing:
        names = ", ".join(repr(name) for name in missing[:3])
        yield f"{len(missing)} of {len(wanted)} {what} stand in no saved file, first {names}"
