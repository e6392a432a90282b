"""Do parameter names map, in memory, in the optimizer and in every saved file?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import FileFact, Moment, PlainFact, Trace


@check(scenario=TRAIN, until=(("train", "files", 0),), order=1)
def names(cell: Cell, trace: Trace) -> Iterator[str]:
    """Live names, without the segments of the cell's own wrappers, equal the plain model's, one to one; so do the names
    under which the optimizer keeps state; and every key in every saved file is a plain name, with nothing to take off.
    Under each name stands a tensor of the plain shape, and no parameter or persistent buffer is in no file.

    If it fails: look for the segment that is too many (``_orig_mod``, ``module``, ``_fsdp_wrapped_module``,
    ``_checkpoint_wrapped_module``) and for what saved it without ``get_model_state_dict``, which takes them off
    (https://pytorch.org/docs/stable/distributed.checkpoint.html#torch.distributed.checkpoint.state_dict.get_model_state_dict).
    """
    life = trace.life()
    first = life.first("plain")
    if first is None or first.plain is None:
        yield "the plain model was not seen"
        return
    oracle = _Oracle(cell, first.plain)
    for moment in (trained := life.at("step", 2)):
        yield from oracle.live(moment)
    yield from every_rank(trained, cell.world_size, "three steps")
    yield from oracle.optimizer(trained)
    written = life.first("files")
    yield from oracle.files(written.files if written else ())


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

    def same(self, name: str) -> str:
        """The first of the names that are tied to this one; the name itself if none is."""
        return self.one.get(name, name)

    def canonical(self, name: str) -> str:
        return self.same(self.strategy.canonical(name, self.cell, self.saved | self.parameters))

    def live(self, moment: Moment) -> Iterator[str]:
        where = f"rank {moment.rank}"
        if moment.model is None:
            yield f"{where}: no model to read names from"
            return
        if any(fact.kind == "FlatParameter" for fact in moment.model.parameters):
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
        if any(fact.kind == "FlatParameter" for moment in trained if moment.model for fact in moment.model.parameters):
            return
        found = {self.canonical(name) for name in owners}
        for name in sorted(self.trainable - found):
            yield f"the optimizer of no rank keeps state for {name!r}"
        for name in sorted(found - self.trainable):
            yield f"the optimizer keeps state for {name!r}, which is no trainable parameter of the plain model"

    def files(self, files: tuple[FileFact, ...]) -> Iterator[str]:
        covered: set[str] = set()
        optimized: set[str] = set()
        for file in files:
            known = self.saved | self.parameters if file.holds == "model" else self.trainable | set(self.one)
            for key in file.keys:
                if key not in known:
                    closest = self.canonical(key)
                    hint = f"; expected {closest!r}" if closest in known else ""
                    yield f"file {file.path!r}: key {key!r} is no name of the plain model{hint}"
                    continue
                found, expected = tuple(file.shapes.get(key, ())), self.shape(key)
                # Extra state is in the plain state dict and is neither parameter nor buffer: it has no plain shape.
                if key in file.shapes and expected is not None and found != expected:
                    yield f"file {file.path!r}: {key!r} has shape {found}; {expected} in the plain model"
            (covered if file.holds == "model" else optimized).update(self.same(key) for key in file.keys)
        buffers = {fact.name for fact in self.plain.buffers if fact.placement == "persistent"}
        yield from _missing("parameters", self.parameters, covered)
        yield from _missing("persistent buffers", buffers, covered)
        if optimized:  # some number their parameters; then there are no names to miss
            yield from _missing("trainable parameters' optimizer states", self.trainable, optimized)


def _missing(what: str, wanted: set[str], covered: set[str]) -> Iterator[str]:
    missing = sorted(wanted - covered)
    if missing:
        names = ", ".join(repr(name) for name in missing[:3])
        yield f"{len(missing)} of {len(wanted)} {what} stand in no saved file, first {names}"
