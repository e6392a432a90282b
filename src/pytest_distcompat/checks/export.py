"""Do the exported weights load with the model's own library, and does a checkpoint of the model alone hold the whole?"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import EXPORTED, and_others, check, every_rank, first_three
from pytest_distcompat.checks._renamed import renamed
from pytest_distcompat.checks._values import (
    adapter_name,
    compare,
    exported_weights,
    flat_parameters,
    in_tf32,
    precision_of_products,
    values,
)
from pytest_distcompat.cost import BYTES
from pytest_distcompat.driver import Driver
from pytest_distcompat.scenario import EXPORT, TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import FileInfo, RunTrace, Snapshot, Trace, UnwrappedInfo

PREFIX = "export/"


def _no_export(cell: Cell, driver: type[Driver]) -> str | None:
    missing = [action for action in ("export", "reload", "evaluate") if not driver.can(action)]
    return f"the driver has no {missing[0]}()" if missing else None


@check(
    scenario=EXPORT,
    until=(("train", "files", 1), ("reload", "evaluate", 0)),
    order=13,
    not_applicable=_no_export,
    depends_on=EXPORTED,
)
def export(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the exported weights are the trained ones, under the unwrapped model's names.

    The files hold whole tensors and no optimizer state; an index names one file for each and the size of all; an adapter
    has PEFT's names. Loaded in one process, every value equals the trained one (the master, or the copy that the model
    computed with), and so do outputs on one batch, within the precision's tolerance.

    If it fails: ``module.`` or ``_orig_mod.`` come from the wrapped model's own ``state_dict()``. ``from_pretrained``
    takes such names for missing weights, which it initializes at random.
    """
    train, reload = trace.run("train"), trace.run("reload")
    if train.unwrapped is None or reload.unwrapped is None:
        yield "the unwrapped model was not recorded"
        return
    yield from every_rank(train.at("export"), cell.world_size, "export")
    files = [file for snapshot in train.at("files", 1) for file in snapshot.files if file.path.startswith(PREFIX)]
    yield from names_in(cell, train.unwrapped, files)
    yield from same_values(train, reload)
    yield from every_rank(train.at("evaluate"), cell.world_size, "evaluate")
    # A rank with statistics of its own (BatchNorm), which are not those in the file, computes something else.
    exported = {info.name: info.digest for info in reload.unwrapped.buffers}
    own = {
        snapshot.rank
        for snapshot in train.at("export")
        for name, digests in values(train, (snapshot,)).of("buffer").items()
        if name in exported and {*digests} - {exported[name]}
    }
    alike = tuple(one for one in train.at("evaluate") if one.rank not in own or len(own) == cell.world_size)
    yield from _outputs(cell, train, alike, reload.at("evaluate"))


def names_in(cell: Cell, unwrapped: UnwrappedInfo, files: list[FileInfo]) -> Iterator[str]:
    """Yield findings about the names and shapes in exported files."""
    for file in files:
        if file.holds not in {"model", "index"}:
            yield f"file {file.path!r} holds {len(file.keys)} keys of an {file.holds}; expected the model alone"
    shapes = {info.name: tuple(info.shape) for info in (*unwrapped.parameters, *unwrapped.buffers)}
    wanted = set(unwrapped.state_dict)
    if cell.option("lora"):
        shapes = {adapter_name(info.name): tuple(info.shape) for info in unwrapped.parameters if info.trainable}
        wanted = set(shapes)
    strategy, known = STRATEGIES.get(cell.strategy), wanted | set(unwrapped.state_dict)
    written = set(unwrapped.written_names)
    models = [file for file in files if file.holds == "model"]
    for file in models:
        # A name that the library writes may be the model's own of another tensor.
        for key in () if written & set(file.keys) - wanted else file.keys:
            if key in file.shapes and key in shapes and tuple(file.shapes[key]) != shapes[key]:
                yield f"file {file.path!r}: {key!r} has shape {tuple(file.shapes[key])}; {shapes[key]} in the unwrapped model"
        if unknown := set(file.keys) - wanted - written:
            closest = strategy.canonical(key := min(unknown), cell, known)
            hint = f"; expected {closest!r}" if closest in wanted and closest != key else ""
            are = "is" if len(unknown) == 1 else "are"
            groups = renamed(unknown, wanted | written)
            cause = "".join(f"{group}: " for group in groups)
            way_out = groups[0].way_out if groups else ""
            yield f"file {file.path!r}: {cause}key {and_others(unknown)} {are} none of the model's own{hint}{way_out}"
    for index in files:
        if index.holds == "index":
            yield from _in_files(index, models)
    found = {key for file in models for key in file.keys}
    tied = {name: set(group) for group in unwrapped.tied for name in group}
    wanted = written if written & found - wanted else wanted
    if missing := sorted(name for name in wanted - found if not tied.get(name, set()) & found):
        yield f"{len(missing)} of {len(wanted)} names are in no exported file, first {first_three(missing)}"


def _in_files(index: FileInfo, models: list[FileInfo]) -> Iterator[str]:
    """Yield findings for an index that names other files for its keys than they are in, or another size."""
    place = index.path.rpartition("/")[0]
    beside = {file.path.rpartition("/")[2]: file for file in models if file.path.rpartition("/")[0] == place}
    stored, named = {(key, name): None for name, file in beside.items() for key in file.keys}, index.files.items()
    lost = [(key, file) for key, file in index.files.items() if (key, file) not in stored]
    others = [(key, file) for key, file in stored if (key, file) not in named]
    # Readers take the one that the index names, and what is in the other file is lost, or outdated.
    twice = [(key, file) for key, file in others if (key, index.files.get(key)) in stored]
    for what, found in (
        ("it names {} keys that are not in their files", lost),
        ("{} keys are in a second file too", twice),
        ("{} keys beside it are not in it", [one for one in others if one not in twice]),
    ):
        if found:
            key, file = found[0]
            yield f"file {index.path!r}: {what.format(len(found))}, first {key!r} in {file!r}"
    # Of the tensors, without the headers of their files; in torch's files tied ones share memory.
    tensors = [(beside[name].shapes.get(key), beside[name].dtypes.get(key)) for key, name in named if name in beside]
    sizes = [math.prod(shape) * BYTES[dtype] for shape, dtype in tensors if shape is not None and dtype in BYTES]
    safe = all(file.format == "safetensors" for file in beside.values())
    if safe and len(sizes) == len(named) and index.total_size not in {None, sum(sizes)}:
        yield f"file {index.path!r}: total_size is {index.total_size}; the tensors that it names have {sum(sizes)} bytes"


def same_values(train: RunTrace, reload: RunTrace, *, only: Collection[str] | None = None) -> Iterator[str]:
    """Yield findings for the reloaded parameters and buffers that are not the trained ones; ``only`` of these names, if given."""
    loaded = reload.unwrapped
    if loaded is None or flat_parameters(train.at("export")):
        return  # a flat parameter has no names to compare by; the outputs are compared instead
    for kind, trained, infos in (
        ("parameter", exported_weights(train, reload), loaded.parameters),
        (
            "buffer",
            values(train, train.at("export")).of("buffer"),
            [info for info in loaded.buffers if info.persistent],
        ),
    ):
        chosen = {name: value for name, value in trained.items() if only is None or name in only}
        yield from compare(kind, chosen, {info.name: (info.digest,) for info in infos}, "after the reload")


def _outputs(
    cell: Cell, train: RunTrace, trained: tuple[Snapshot, ...], reloaded: tuple[Snapshot, ...]
) -> Iterator[str]:
    """Yield findings for outputs that differ by more than the tolerance of gradient norms, relative to the largest one."""
    if not reloaded or not reloaded[0].outputs:
        yield "the reloaded model computed nothing"
        return
    expected = reloaded[0].outputs
    if infinite := sum(not math.isfinite(value) for value in expected):
        yield f"{infinite} of {len(expected)} outputs of the reloaded model are infinite; expected finite numbers"
        return
    largest = max(map(abs, expected))
    allowed = largest * precision_of_products(cell, train).norm_tolerance
    for snapshot in trained:
        if (got := len(snapshot.outputs)) != len(expected):
            yield f"rank {snapshot.rank}: {got} outputs of the trained model; {len(expected)} of the reloaded one"
            continue
        apart = [abs(one - other) for one, other in zip(snapshot.outputs, expected, strict=True)]
        # Not ``any(off > allowed)``, which is false for NaN.
        if not all(off <= allowed for off in apart):
            distance = f"up to {max(apart):.3g} apart ({allowed:.1e} allowed, of {largest:.3g})"
            yield f"rank {snapshot.rank}: outputs of the trained and of the reloaded model are {distance}{in_tf32(train)}"


def _saves_optimizer(cell: Cell, driver: type[Driver]) -> str | None:
    return None if cell.option("save_only_model") else "the cell saves the optimizer too"


@check(scenario=TRAIN, until=(("train", "files", 0),), order=15, not_applicable=_saves_optimizer)
def save_only_model(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a checkpoint saved with save_only_model holds all weights, and no optimizer or scheduler state.

    The weights are bit by bit those trained at the save. A trainer that cannot do that must raise when it is built, as
    ``refuses(..., save_only_model=True, match=...)`` declares. transformers raised at the first checkpoint, after hours
    (https://github.com/huggingface/transformers/issues/36626).

    If it fails: weights were not gathered, or were filtered by a name that wrapping had changed.
    """
    run = trace.run()
    unwrapped, at_save = run.unwrapped, run.at("save")
    yield from every_rank(at_save, cell.world_size, "save")
    files = [file for snapshot in run.at("files") for file in snapshot.saved]
    if unwrapped is None or not run.at("files"):
        yield "the saved files were not read"
        return
    for owner, holds in (("an optimizer", "optimizer"), ("a scheduler", "scheduler")):
        paths = [repr(file.path) for file in files if file.holds == holds]
        if paths:
            yield f"state of {owner} is in {', '.join(paths[:3])}; the checkpoint is of the model alone"
    names = [info.name for info in (*unwrapped.parameters, *(one for one in unwrapped.buffers if one.persistent))]
    if cell.option("lora"):
        names = [info.name for info in unwrapped.parameters if info.trainable]
    saved: dict[str, set[str]] = {}
    for key, digest in (pair for file in files for pair in file.digests.items()):
        saved.setdefault(key, set()).add(digest)
    weights = {name: saved[key] for key, name in _keys(unwrapped, names) if key in saved}
    if missing := [name for name in names if name not in weights]:
        yield f"{len(missing)} of {len(names)} weights are not saved, first {first_three(missing)}"
    if flat_parameters(at_save):
        return  # flat parameters have no unwrapped names to compare by
    trained = values(run, at_save)
    yield from trained.wrong
    held = [trained.of(kind) for kind in ("parameter", "buffer", "master")]
    copies = {name: {digest for found in held for digest in found.get(name, ())} for name in names}
    if wrong := [name for name, digests in weights.items() if not copies[name].issuperset(digests)]:
        finding = f"{len(wrong)} of {len(names)} weights have other values in the checkpoint than at the save"
        yield f"{finding}, first {first_three(wrong)}"


def _keys(unwrapped: UnwrappedInfo, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each key that a weight may have in a file, with the weight's name: PEFT's, a tied one, its own."""
    yield from ((adapter_name(name), name) for name in names)
    yield from ((name, group[0]) for group in unwrapped.tied for name in group if group[0] in names)
    yield from ((name, name) for name in names)
