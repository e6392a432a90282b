"""Do the exported weights load by the model's own library, and compute what was trained?"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.checks._values import compare, flat_parameters, values
from pytest_distcompat.checks.names import adapter_name
from pytest_distcompat.cost import BYTES
from pytest_distcompat.driver import Driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import EXPORT
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import FileFact, LifeTrace, Moment, PlainFact, Trace

PREFIX = "export/"


def _exports(cell: Cell, driver: type[Driver]) -> str:
    missing = [verb for verb in ("export", "reload", "evaluate") if not driver.can(verb)]
    return f"the driver has no {missing[0]}()" if missing else ""


@check(scenario=EXPORT, until=(("train", "files", 1), ("reload", "evaluate", 0)), order=13, applies=_exports)
def export(cell: Cell, trace: Trace) -> Iterator[str]:
    """The exported files hold the plain model's state dict under its own names (of tied names one is enough; of a model
    with an adapter the adapter alone, as PEFT names it), whole tensors, and nothing of an optimizer. Loaded by the model's
    own library in one process, every parameter and persistent buffer equals the trained one value by value (the masters, or
    the copies that the model computed with where the export is in a lower dtype), and on the same batch the outputs are
    those of the trained model, within the precision's tolerance.

    If it fails: names with ``module.``, ``_orig_mod.`` or ``_checkpoint_wrapped_module`` were saved by the wrapped model's
    own ``state_dict()``: transformers' ``from_pretrained`` takes them for missing weights and makes new ones at random.
    """
    train, reload = trace.life("train"), trace.life("reload")
    first, written, loaded = train.first("plain"), train.at("files", 1), reload.first("reload")
    if first is None or first.plain is None or loaded is None or loaded.plain is None:
        yield "the plain model was not seen"
        return
    yield from every_rank(train.at("export"), cell.world_size, "export")
    files = [file for moment in written for file in moment.files if file.path.startswith(PREFIX)]
    yield from names_in(cell, first.plain, files)
    yield from same_values(train, reload, loaded.plain)
    yield from _outputs(cell, train.at("evaluate"), reload.at("evaluate"))


def names_in(cell: Cell, plain: PlainFact, files: list[FileFact]) -> Iterator[str]:
    """What is wrong with the names and shapes in exported files."""
    for file in files:
        if file.holds != "model":
            yield f"file {file.path!r} holds {len(file.keys)} keys of an {file.holds}; expected the model alone"
    shapes = {fact.name: tuple(fact.shape) for fact in (*plain.parameters, *plain.buffers)}
    wanted = set(plain.state_dict)
    if cell.option("adapter"):
        shapes = {adapter_name(fact.name): tuple(fact.shape) for fact in plain.parameters if fact.trainable}
        wanted = set(shapes)
    strategy, known = STRATEGIES.get(cell.strategy), wanted | set(plain.state_dict)
    models = [file for file in files if file.holds == "model"]
    for file in models:
        for key in file.keys:
            if key in file.shapes and key in shapes and tuple(file.shapes[key]) != shapes[key]:
                yield f"file {file.path!r}: {key!r} has shape {tuple(file.shapes[key])}; {shapes[key]} in the plain model"
        unknown = sorted(set(file.keys) - wanted)
        if unknown:
            key, *others = unknown
            closest = strategy.canonical(key, cell, known)
            hint = f"; expected {closest!r}" if closest in wanted and closest != key else ""
            told = f"{key!r}{f' and {len(others)} others are' if others else ' is'} none of the model's own{hint}"
            yield f"file {file.path!r}: key {told}"
    found = {key for file in models for key in file.keys}
    tied = {name: set(group) for group in plain.tied for name in group}
    missing = sorted(name for name in wanted - found if not tied.get(name, set()) & found)
    if missing:
        shown = ", ".join(repr(name) for name in missing[:3])
        yield f"{len(missing)} of {len(wanted)} names stand in no exported file, first {shown}"


def same_values(
    train: LifeTrace, reload: LifeTrace, loaded: PlainFact, *, only: Collection[str] | None = None
) -> Iterator[str]:
    """Compare the model that was reloaded with what was trained; ``only`` these of its names, if they are given."""
    if flat_parameters(train.at("export")):
        return  # a flat parameter has no names; what the exported model computes tells
    now = {fact.name: (fact.digest,) for fact in loaded.parameters}
    yield from compare("parameter", _chosen(exported_weights(train, reload), only), now, "after the reload")
    kept = {fact.name: (fact.digest,) for fact in loaded.buffers if fact.placement == "persistent"}
    was = values(train, train.at("export")).of("buffer")
    yield from compare("buffer", _chosen(was, only), kept, "after the reload")


def _chosen(found: Mapping[str, tuple[str, ...]], only: Collection[str] | None) -> Mapping[str, tuple[str, ...]]:
    return found if only is None else {name: value for name, value in found.items() if name in only}


def exported_weights(train: LifeTrace, reload: LifeTrace) -> Mapping[str, tuple[str, ...]]:
    """What the export stands for: the masters, or, of what was reloaded in a lower dtype, the copies in that dtype.

    By each tensor's own dtype: trained weights may be exported in float32 beside frozen ones in bfloat16.
    """
    trained = values(train, train.at("export"))
    loaded = reload.first("reload")
    model = next((moment.model for moment in train.at("export") if moment.model), None)
    if not trained.of("master") or loaded is None or loaded.plain is None or model is None:
        return trained.weights
    live = max(BYTES.get(fact.dtype, 4) for fact in model.parameters)
    # The file's own dtype: PEFT widens what it loads.
    written = {
        key: dtype for moment in train.at("files", 1) for file in moment.files for key, dtype in file.dtypes.items()
    }
    told = {
        fact.name: written.get(fact.name) or written.get(adapter_name(fact.name)) or fact.dtype
        for fact in loaded.plain.parameters
    }
    sizes = {name: BYTES.get(dtype, 4) for name, dtype in told.items()}
    copies = trained.of("parameter")
    return {
        name: copies[name] if name in copies and sizes.get(name, 4) <= live < BYTES["float32"] else master
        for name, master in trained.weights.items()
    }


def _outputs(cell: Cell, trained: tuple[Moment, ...], reloaded: tuple[Moment, ...]) -> Iterator[str]:
    """As far off as gradient norms may be, of the largest output: both are sums of products in that precision."""
    yield from every_rank(trained, cell.world_size, "evaluate")
    if not reloaded or not reloaded[0].outputs:
        yield "the reloaded model computed nothing"
        return
    expected = reloaded[0].outputs
    infinite = sum(not math.isfinite(value) for value in expected)
    if infinite:
        yield f"{infinite} of {len(expected)} outputs of the reloaded model are infinite; expected finite numbers"
        return
    largest = max(abs(value) for value in expected)
    allowed = largest * PRECISIONS.get(cell.precision).norm_tolerance
    for moment in trained:
        if len(moment.outputs) != len(expected):
            yield f"rank {moment.rank}: {len(moment.outputs)} outputs of the trained model; {len(expected)} of the reloaded one"
            continue
        apart = [abs(one - other) for one, other in zip(moment.outputs, expected, strict=True)]
        # Not "any is larger": no comparison holds of NaN.
        if not all(off <= allowed for off in apart):
            told = f"up to {max(apart):.3g} apart ({allowed:.1e} allowed, of {largest:.3g})"
            yield f"rank {moment.rank}: outputs of the trained and of the reloaded model are {told}"
