"""Data loaders and evaluation metrics of the four libraries, read for the built-in drivers.

A driver is the class by which a trainer is tested. On each rank its method ``rows`` calls a
function ``..._rows`` of this module, and its method ``metrics`` calls ``..._metrics``; a data set
of 23 rows is usual. No model is trained for a loader, except by Trainer, which has no loader
without a training.

The data set's rows are the numbers 0, 1, 2 ..., so that a batch shows which rows it has. A
function ``..._rows`` yields (epoch, rows) for each batch of this rank: ``(0, [4, 17])``,
``(0, [2, 9])``, and so on for two epochs. A function ``..._metrics`` returns numbers by name:
``{"shuffle: rows": 23.0, "shuffle: mean": 165.0}``.

What is read is judged elsewhere: the check ``coverage`` compares the rows of all ranks with a
``Loader``, which says what a loader must do: its order changes from epoch to epoch (``shuffled``);
the last batches are filled with rows of the beginning (``filled``), or rows that fill no batch are
left out (``dropped``); it goes on in the middle of an epoch (``resumes``), also with another number
of ranks (``moves``); with another seed it has another order than the loader named in ``reseeded``.
The check ``evaluation`` compares the metrics with those of one process. The tables ``ACCELERATE``,
``TRAINER``, ``DEEPSPEED`` and ``TORCH`` have the ``Loader`` of each loader by its name, such as
``"dispatch_batches"``. Drivers have them as their attribute ``loaders``.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pytest_distcompat.driver import RESUME_AT
from pytest_distcompat.installed import version_of
from pytest_distcompat.trace import LoadedBatch, Loader

#: How many rows a batch of one rank has.
BATCH = 2
#: How many rows a batch has that the ranks split among them (``split_batches``), or the next number
#: that divides by the ranks. On two ranks each then has 2 rows, as many as ``BATCH``.
SPLIT = 4
#: How many epochs of a loader are read.
EPOCHS = 2
#: Of each batch that a rank reads, its epoch and its rows: ``(1, [4, 17])``; of some loaders also
#: their length.
Batches = Iterator[tuple[int, Sequence[int]] | LoadedBatch]
#: Where reading begins: an epoch, and how many of its batches were read before. ``(0, 0)`` is the
#: beginning; processes that resume begin at one of ``RESUME_AT``: ``(1, 0)`` or ``(1, 2)``. Twice
#: as many ranks resume at ``(1, 1)``, where as many rows were read.
_Start = tuple[int, int]

#: torchdata's loader saves and restores its position itself.
_STATEFUL: dict[str, dict[str, Any]] = {
    "use_stateful_dataloader": {"use_stateful_dataloader": True, "use_seedable_sampler": True},
    "use_stateful_dataloader, in order": {"use_stateful_dataloader": True, "shuffle": False},
    "use_stateful_dataloader, num_workers=1": {
        "use_stateful_dataloader": True,
        "shuffle": False,
        "num_workers": 1,
    },
    "use_stateful_dataloader, dispatch_batches": {
        "use_stateful_dataloader": True,
        "shuffle": False,
        "dispatch_batches": True,
    },
    "use_stateful_dataloader, dispatch_batches, num_workers=1": {
        "use_stateful_dataloader": True,
        "shuffle": False,
        "dispatch_batches": True,
        "num_workers": 1,
    },
    "use_stateful_dataloader, even_batches=False": {
        "use_stateful_dataloader": True,
        "shuffle": False,
        "even_batches": False,
    },
    "use_stateful_dataloader, iterable": {
        "use_stateful_dataloader": True,
        "iterable": True,
        "dispatch_batches": False,
    },
}
#: Settings of accelerate's loaders, by the loader's name: those of DataLoaderConfiguration and
#: those of DataLoader together. Two keys are about the data set: ``rows`` is the number of its
#: rows, ``iterable`` makes it one without a length. ``seed`` is that of ``set_seed``, and with
#: ``calls_set_epoch`` False nobody calls ``set_epoch``. ``samples`` names what a user passes to
#: DataLoader instead of ``shuffle``, a sampler of the module ``_samplers``. ``accelerate_loader``
#: takes them apart.
_ACCELERATE: dict[str, dict[str, Any]] = {
    "shuffle": {},
    "seedable": {"use_seedable_sampler": True},
    "in order": {"shuffle": False},
    "dispatch_batches": {"use_seedable_sampler": True, "dispatch_batches": True},
    "split_batches": {"use_seedable_sampler": True, "split_batches": True},
    "even_batches=False": {"use_seedable_sampler": True, "even_batches": False},
    "drop_last": {"use_seedable_sampler": True, "drop_last": True},
    "num_workers=2": {"use_seedable_sampler": True, "num_workers": 2},
    "iterable": {"iterable": True},
    "iterable, dispatch_batches=False": {"iterable": True, "dispatch_batches": False},
    "iterable, split_batches": {"iterable": True, "split_batches": True},
    # With these, each two settings are together in some loader. They do not shuffle: so the rows of
    # a batch are known, not only repeatable.
    "dispatch_batches, split_batches, drop_last": {
        "shuffle": False,
        "split_batches": True,
        "dispatch_batches": True,
        "drop_last": True,
    },
    "dispatch_batches, split_batches": {
        "shuffle": False,
        "split_batches": True,
        "dispatch_batches": True,
    },
    "split_batches, even_batches=False": {
        "shuffle": False,
        "split_batches": True,
        "even_batches": False,
    },
    "dispatch_batches, even_batches=False": {
        "shuffle": False,
        "dispatch_batches": True,
        "even_batches": False,
    },
    "drop_last, even_batches=False": {
        "shuffle": False,
        "drop_last": True,
        "even_batches": False,
    },
    "dispatch_batches, num_workers=2": {
        "shuffle": False,
        "dispatch_batches": True,
        "num_workers": 2,
    },
    "iterable, drop_last": {"iterable": True, "dispatch_batches": False, "drop_last": True},
    "iterable, even_batches=False": {
        "iterable": True,
        "dispatch_batches": False,
        "even_batches": False,
    },
    "one row": {"shuffle": False, "rows": 1},
    "one row, dispatch_batches": {"shuffle": False, "dispatch_batches": True, "rows": 1},
    "one row, split_batches": {
        "shuffle": False,
        "split_batches": True,
        "rows": 1,
    },
    # As a plain loop has it, which reads the loader once an epoch: accelerate counts the epochs.
    "shuffle, no set_epoch": {"calls_set_epoch": False},
    "seedable, no set_epoch": {"use_seedable_sampler": True, "calls_set_epoch": False},
    "dispatch_batches, no set_epoch": {
        "use_seedable_sampler": True,
        "dispatch_batches": True,
        "calls_set_epoch": False,
    },
    "in order, no set_epoch": {"shuffle": False, "calls_set_epoch": False},
    "set_seed": {"seed": 1},
    "data_seed": {"use_seedable_sampler": True, "data_seed": 1},
    "sampler": {"samples": "sampler"},
    "sampler, use_seedable_sampler": {"samples": "RandomSampler", "use_seedable_sampler": True},
    "sampler, dispatch_batches": {"samples": "sampler", "dispatch_batches": True},
    "sampler with a generator": {"samples": "sampler with a generator"},
    "batch_sampler": {"samples": "BatchSampler", "use_seedable_sampler": True},
    "batch_sampler, drop_last": {
        "samples": "BatchSampler",
        "use_seedable_sampler": True,
        "drop_last": True,
    },
    "batch_sampler with set_epoch": {"samples": "batch_sampler with set_epoch"},
    # https://docs.pytorch.org/docs/stable/data.html#disable-automatic-batching. There is none with
    # dispatch_batches, which loses the sampler: docs/upstream/accelerate_dispatched_batches.py.
    "batch_size=None": {"samples": "batches in order", "shuffle": False},
    "batch_size=None, drop_last": {
        "samples": "batches in order",
        "shuffle": False,
        "drop_last": True,
    },
    "batch_size=None, shuffle": {"samples": "batches", "use_seedable_sampler": True},
    "batch_size=None with set_epoch": {"samples": "batches with set_epoch"},
    # A data set that streams whole batches.
    "batch_size=None, iterable": {"iterable": True, "batch_size": None},
}
#: Loaders with another seed than that of another loader alone -> that loader.
_RESEEDED = {"set_seed": "shuffle", "data_seed": "seedable"}
#: What a user passes to DataLoader so that the data set is given the rows of a whole batch.
_WHOLE_BATCHES = frozenset({"batches", "batches in order", "batches with set_epoch"})
#: The ways of sampling in which the order depends on seed and epoch alone.
_BY_EPOCH = frozenset({"sampler", "batch_sampler with set_epoch", "batches with set_epoch"})
if version_of("torchdata"):
    _ACCELERATE |= _STATEFUL


def _expected(name: str) -> Loader:
    """Return what accelerate's loader of that name must do."""
    settings = _ACCELERATE[name]
    shuffled = settings.get("shuffle", True) and "iterable" not in settings
    # The order is that of a seed, or not shuffled: on any number of ranks the same rows come first.
    # Without this, a loader cannot go on at another number of ranks (``moves``).
    by_seed = "use_seedable_sampler" in settings or settings.get("samples") in _BY_EPOCH
    repeatable = not shuffled or by_seed
    # With either setting, a position in the loader of 2 ranks is not that of the same row in the
    # loader of 4.
    other_positions = "split_batches" in settings or "use_stateful_dataloader" in settings
    return Loader(
        shuffled,
        filled=settings.get("even_batches", True),
        dropped="drop_last" in settings,
        # An epoch of one batch has no middle to resume in.
        resumes="rows" not in settings,
        # Which rank's state is saved is chance: docs/upstream/accelerate_stateful_dispatch.py.
        midway=not {"use_stateful_dataloader", "dispatch_batches"}.issubset(settings),
        moves=repeatable and not other_positions and "rows" not in settings,
        rows=settings.get("rows", 0),
        reseeded=_RESEEDED.get(name, ""),
    )


#: Name of a loader of accelerate -> what it must do.
ACCELERATE: dict[str, Loader] = {name: _expected(name) for name in _ACCELERATE}


def accelerate_loaders(ranks: int) -> dict[str, Loader]:
    """Return the loaders that accelerate can prepare for so many data parallel ranks.

    For a single rank it can prepare none of whole batches:
    docs/upstream/accelerate_sampled_batches.py.
    """
    if ranks > 1:
        return ACCELERATE
    return {name: loader for name, loader in ACCELERATE.items() if not _has_whole_batches(name)}


def _has_whole_batches(name: str) -> bool:
    """Tell whether the data set of accelerate's loader of that name is asked for whole batches."""
    return _ACCELERATE[name].get("samples") in _WHOLE_BATCHES


def _streams_batches(name: str) -> bool:
    """Tell whether the data set of accelerate's loader of that name gives whole batches."""
    settings = _ACCELERATE[name]
    return "iterable" in settings and settings.get("batch_size", BATCH) is None


def _is_stateful(name: str) -> bool:
    """Tell whether accelerate's loader of that name is torchdata's, which saves its position."""
    return "use_stateful_dataloader" in _ACCELERATE[name]


def iterable(rows: Sequence[Any], *, uncounted: bool = False) -> Any:
    """Return the rows as an ``IterableDataset``, which has no length.

    Args:
        rows: The rows.
        uncounted: Whether it has ``__len__``, which raises an error. That of Ray does:
            https://docs.ray.io/en/latest/data/api/dataset.html
    """
    from torch.utils.data import IterableDataset

    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(rows)

    class UncountedRows(Rows):
        def __len__(self) -> int:
            raise AttributeError("count() tells the length of this data set")

    if uncounted:
        return UncountedRows()
    return Rows()


#: Of ``TRAINER_SETTINGS``: a data set whose ``__len__`` raises an error.
UNCOUNTED = "uncounted"


def trainer_dataset(rows: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    """Return the rows as the data set that one of ``TRAINER_SETTINGS`` asks for."""
    kind = settings.get("iterable")
    if kind:
        return iterable(rows, uncounted=kind == UNCOUNTED)
    return rows


def _split_among(ranks: int) -> int:
    """Return how many rows a batch has that so many ranks split among them."""
    return math.ceil(SPLIT / ranks) * ranks


def _taken_apart(name: str, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of DataLoaderConfiguration, and those of DataLoader.

    Args:
        name: One of ``ACCELERATE``.
        count: The number of rows.
    """
    from pytest_distcompat.ext.upstream.drivers._samplers import sampling

    configuration = dict(_ACCELERATE[name])
    for key in ("rows", "calls_set_epoch", "seed"):
        configuration.pop(key, None)
    is_iterable = configuration.pop("iterable", False)
    samples = configuration.pop("samples", None)
    arguments: dict[str, Any] = {"batch_size": BATCH, "shuffle": not is_iterable}
    for key in ("batch_size", "drop_last", "num_workers", "shuffle"):
        if key in configuration:
            arguments[key] = configuration.pop(key)
    if samples:
        # These arguments have the batch size and ``drop_last`` in them, and no ``shuffle``.
        arguments = sampling(samples, range(count), BATCH, arguments.get("drop_last", False))
    return configuration, arguments


def accelerate_loader(
    name: str, count: int, device: str = "cpu", parallel: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Any, Any]:
    """Return an Accelerator on that device and its prepared loader of that name.

    Args:
        name: One of ``ACCELERATE``.
        count: The number of rows.
        device: ``cpu`` or that of this rank.
        parallel: The arguments of Accelerator for a mesh, such as ``fsdp_plugin`` and
            ``parallelism_config``; empty for data parallelism alone. The rows of each rank depend
            on the mesh: ranks of one tensor-parallel group read the same.
    """
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader

    from pytest_distcompat.ext.upstream.drivers._samplers import WholeBatches, batches_in_order

    configuration, arguments = _taken_apart(name, count)
    # The arguments for a mesh choose the device already.
    on_device = parallel or {"cpu": device == "cpu"}
    dataloader_config = DataLoaderConfiguration(**configuration)
    accelerator = Accelerator(dataloader_config=dataloader_config, **on_device)
    set_seed(_ACCELERATE[name].get("seed", 0))
    data: Any = range(count)
    if "iterable" in _ACCELERATE[name]:
        data = iterable(data)
    if _streams_batches(name):
        data = iterable(batches_in_order(count, BATCH))
    if _has_whole_batches(name):
        data = WholeBatches(count)
    if dataloader_config.split_batches:
        arguments["batch_size"] = _split_among(accelerator.num_processes)
    loader: DataLoader[Any] = DataLoader(data, **arguments)
    if _has_whole_batches(name) and accelerator.num_processes == 1:
        # accelerate can prepare it for several ranks alone; one rank reads all its rows anyway.
        return accelerator, loader
    return accelerator, accelerator.prepare(loader)


def accelerate_rows(
    name: str,
    count: int,
    start: _Start,
    directory: Path,
    *,
    device: str = "cpu",
    parallel: Mapping[str, Any] = MappingProxyType({}),
) -> Batches:
    """Yield the epoch and the rows of each batch that this rank reads.

    A run resumes as accelerate's documentation says: ``load_state``, then ``skip_first_batches``.

    Args:
        name: One of ``ACCELERATE``.
        count: The number of rows.
        start: Where to begin: an epoch, and how many of its batches were read before. A run that
            begins at (0, 0) saves its state wherever another one resumes.
        directory: The states are saved there.
        device: ``cpu`` or that of this rank.
        parallel: The arguments of Accelerator for a mesh.
    """
    accelerator, loader = accelerate_loader(name, count, device, parallel)
    first_epoch, done = start
    stateful = _is_stateful(name)
    calls_set_epoch = not stateful and _ACCELERATE[name].get("calls_set_epoch", True)
    saved = directory / f"{name}-{first_epoch}-{done}"
    # No state is saved at the beginning, nor at (1, 1), where twice as many ranks go on: these only
    # skip the batches that were read before.
    if saved.exists():
        accelerator.load_state(str(saved))
    saves = start == (0, 0)
    for epoch in range(first_epoch, EPOCHS):
        skipped = 0
        # A stateful loader counts epochs itself, and has its position from ``load_state``.
        if calls_set_epoch:
            loader.set_epoch(epoch)
        if not stateful and epoch == first_epoch:
            skipped = done
        batches = loader
        if skipped:
            batches = accelerator.skip_first_batches(loader, skipped)
        number = skipped
        length = _length(batches)
        # A stateful loader that goes on in the middle of an epoch has the length of a whole one.
        if stateful and epoch == first_epoch and done:
            length = None
        for batch in batches:
            yield LoadedBatch(epoch, batch.tolist(), length)
            number += 1
            if saves and (epoch, number) in RESUME_AT:
                state = directory / f"{name}-{epoch}-{number}"
                accelerator.save_state(str(state))
        next_epoch = epoch + 1
        if saves and (next_epoch, 0) in RESUME_AT:
            state = directory / f"{name}-{next_epoch}-0"
            accelerator.save_state(str(state))


def _length(loader: Any) -> int | None:
    """Return how many batches a loader says that it has; None if it has no length."""
    try:
        return len(loader)
    except TypeError:
        return None


def ulysses_loaders(cp: int) -> dict[str, Loader]:
    """Return the loaders of accelerate that are tested under DeepSpeed's Ulysses.

    None resumes: docs/upstream/accelerate_ulysses_skip.py. Ulysses gathers one batch of each rank
    that shares a sequence, and gives all these ranks the batches, one after the other. So each must
    have as many batches as the others, of as many rows. An epoch may lack, or repeat, the rows of
    several batches.

    Args:
        cp: How many ranks share a sequence.
    """
    loaders: dict[str, Loader] = {}
    for name, loader in ACCELERATE.items():
        unequal = not loader.filled or loader.dropped or loader.rows > 0
        whole_batches = _has_whole_batches(name) or _streams_batches(name)
        if unequal or whole_batches or _is_stateful(name):
            continue
        loaders[name] = dataclasses.replace(loader, resumes=False, moves=False, turns=cp)
    return loaders


def ulysses_rows(name: str, count: int, accelerator: Any, model: Any, tokens: int) -> Batches:
    """Yield the epoch and the rows of each batch that Ulysses gives this rank a part of.

    All tokens of a row are its number.

    Args:
        name: One of ``ulysses_loaders``.
        count: The number of rows.
        accelerator: The Accelerator with which the model was prepared.
        model: The prepared model.
        tokens: The number of tokens of a row.
    """
    import torch
    from accelerate import DataLoaderConfiguration
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader

    configuration, arguments = _taken_apart(name, count)
    accelerator.dataloader_config = DataLoaderConfiguration(**configuration)
    if accelerator.dataloader_config.split_batches:
        arguments["batch_size"] = _split_among(accelerator.num_processes)
    set_seed(_ACCELERATE[name].get("seed", 0))
    data: Any = []
    for row in range(count):
        row_tokens = torch.full((tokens,), row)
        positions = torch.arange(tokens)
        data.append({"input_ids": row_tokens, "labels": row_tokens, "position_ids": positions})
    if "iterable" in _ACCELERATE[name]:
        data = iterable(data)
    prepared = accelerator.prepare(DataLoader(data, **arguments))
    loader = accelerator.deepspeed_ulysses_dl_adapter(prepared, model)
    for epoch in range(EPOCHS):
        for batch in loader:
            yield epoch, batch["input_ids"][:, 0].tolist()


def evaluated_loaders(loaders: Mapping[str, Loader]) -> list[str]:
    """Return the names of accelerate's loaders that evaluations gather rows of.

    For the others a comment says why they are left out.
    """
    names: list[str] = []
    for name, expected in loaders.items():
        settings = _ACCELERATE[name]
        if expected.dropped or not expected.filled or "num_workers" in settings:
            # The ranks have unequal numbers of rows to gather, or not all rows; a worker process
            # that reads the rows makes no difference.
            continue
        if expected.rows:
            # The check of coverage shows what such a small data set breaks.
            continue
        if expected.reseeded or not settings.get("calls_set_epoch", True):
            # They differ from another loader in the order of their rows.
            continue
        if _is_stateful(name) and not expected.shuffled:
            # They differ from the stateful loader that shuffles in how they resume.
            continue
        names.append(name)
    return names


def accelerate_metrics(
    count: int, device: str = "cpu", parallel: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, float]:
    """Return how many rows ``gather_for_metrics`` gives of each loader, and their mean square.

    The names are ``"dispatch_batches: rows"`` and ``"dispatch_batches: mean"``. The number of rows
    shows duplicates that were not removed, the mean square shows wrong rows.

    Args:
        count: The number of rows.
        device: ``cpu`` or that of this rank.
        parallel: The arguments of Accelerator for a mesh.
    """
    import torch

    metrics: dict[str, float] = {}
    for name in evaluated_loaders(ACCELERATE):
        accelerator, loader = accelerate_loader(name, count, device, parallel)
        gathered = [accelerator.gather_for_metrics(batch) for batch in loader]
        squares = torch.cat(gathered).double() ** 2
        metrics[f"{name}: rows"] = float(len(squares))
        metrics[f"{name}: mean"] = float(squares.mean())
    return metrics


#: The name of the loader that Trainer evaluates with. No training reads it.
EVALUATION_LOADER = "get_eval_dataloader"
#: Settings of Trainer's loaders, by the loader's name: those of its ``accelerator_config`` and
#: those of TrainingArguments together, which ``loader_arguments`` takes apart. ``iterable`` is
#: about the data set: it makes one without a length, or one that is UNCOUNTED.
TRAINER_SETTINGS: dict[str, dict[str, Any]] = {
    "shuffle": {},
    "dispatch_batches": {"dispatch_batches": True},
    "split_batches": {"split_batches": True},
    "dataloader_drop_last": {"dataloader_drop_last": True},
    "iterable": {"iterable": True},
    "iterable, dispatch_batches=False": {"iterable": True, "dispatch_batches": False},
    "iterable, uncounted": {"iterable": UNCOUNTED, "dispatch_batches": False},
    "sequential": {"train_sampling_strategy": "sequential"},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "dataloader_num_workers=1": {"dataloader_num_workers": 1},
    "seed": {"seed": 1},
    "data_seed": {"data_seed": 7, "seed": 1},
    "use_seedable_sampler=False": {"use_seedable_sampler": False},
    "dispatch_batches, dataloader_drop_last": {
        "dispatch_batches": True,
        "dataloader_drop_last": True,
    },
    "split_batches, dataloader_drop_last": {
        "split_batches": True,
        "dataloader_drop_last": True,
    },
    "iterable, dataloader_drop_last": {
        "iterable": True,
        "dispatch_batches": False,
        "dataloader_drop_last": True,
    },
    # Without dropping rows some ranks would train on a batch more, and wait for the others.
    "even_batches=False, dataloader_drop_last": {
        "even_batches": False,
        "dataloader_drop_last": True,
    },
    EVALUATION_LOADER: {"per_device_eval_batch_size": BATCH},
}
#: The strategies of sampling that ask for the length of each row.
BY_LENGTH = frozenset({"group_by_length", "batch_rebalance"})
#: Loaders with another seed than that of another loader alone -> that loader.
_TRAINER_RESEEDED = {"seed": "shuffle", "data_seed": "seed"}


def _expected_of_trainer(name: str) -> Loader:
    """Return what Trainer's loader of that name must do."""
    settings = TRAINER_SETTINGS[name]
    in_order = "iterable" in settings or name in {"sequential", EVALUATION_LOADER}
    return Loader(
        shuffled=not in_order,
        dropped="dataloader_drop_last" in settings,
        # No training reads the loader of evaluations.
        resumes=name != EVALUATION_LOADER,
        # Trainer saves its position in steps. With another number of ranks an epoch has another
        # number of them.
        moves=False,
        reseeded=_TRAINER_RESEEDED.get(name, ""),
    )


#: Name of a loader of Trainer -> what it must do.
TRAINER: dict[str, Loader] = {name: _expected_of_trainer(name) for name in TRAINER_SETTINGS}


def _numbered(count: int, *, tokens: bool) -> list[dict[str, Any]]:
    """Return rows that hold their own number, and optionally tokens to group them by length."""
    import torch

    rows = []
    for number in range(count):
        value = torch.tensor([float(number)])
        row = {"x": value, "labels": value}
        if tokens:
            row["input_ids"] = torch.zeros(1 + number % 5)
        rows.append(row)
    return rows


def _joined(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collate rows to a batch, without their tokens."""
    import torch

    numbers = torch.stack([row["x"] for row in rows])
    labels = torch.stack([row["labels"] for row in rows])
    return {"x": numbers, "labels": labels}


def _steps(count: int, rows_a_step: int, settings: Mapping[str, Any]) -> int:
    """Return how many steps an epoch of ``count`` rows has.

    Args:
        count: The number of rows.
        rows_a_step: How many rows all ranks together read in a step.
        settings: The arguments of ``TrainingArguments``.
    """
    if settings.get("dataloader_drop_last"):
        return count // rows_a_step
    return math.ceil(count / rows_a_step)


def _recorder() -> Any:
    """Return a model that records the rows that it is trained on, and returns its input as logits.

    Its ``fed`` has a list for each epoch that began, of the batches with their rows:
    ``[[[4.0, 17.0], [2.0, 9.0]], [...]]``. ``epochs_callback`` adds the list of an epoch.
    """
    import torch

    class _Recorder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))
            self.fed: list[list[list[float]]] = []

        def forward(self, x: Any, labels: Any) -> Any:
            if self.training:
                self.fed[-1].append(x.flatten().tolist())
            # The optimizer needs a parameter with a gradient; this one does not change the loss.
            squares = (0 * self.scale + labels).square()
            return {"loss": squares.mean(), "logits": x}

    return _Recorder()


def epochs_callback(*, saves: bool = True) -> Any:
    """Return a callback that begins the recorder's epochs, and saves where others resume.

    The model must have ``fed``, as ``_recorder`` has it; ``_mesh_rows`` gives it to another model.

    Args:
        saves: Whether a training can be resumed at all.
    """
    from transformers import TrainerCallback

    class _Epochs(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        def on_epoch_begin(self, *_: Any, model: Any, **__: Any) -> None:
            model.fed.append([])

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            steps_per_epoch = state.max_steps // EPOCHS
            # Trainer counts steps over all epochs; ``RESUME_AT`` has (epoch, batches of it).
            save_steps = [epoch * steps_per_epoch + done for epoch, done in RESUME_AT]
            control.should_save = saves and state.global_step in save_steps

    return _Epochs()


def loader_arguments(settings: Mapping[str, Any], count: int, ranks: int) -> dict[str, Any]:
    """Return the arguments of ``TrainingArguments`` for one of ``TRAINER_SETTINGS``.

    Args:
        settings: Those of ``TRAINER_SETTINGS``.
        count: The number of rows.
        ranks: The number of ranks that read different rows.
    """
    arguments = dict(settings)
    is_iterable = arguments.pop("iterable", False)
    accelerator_config: dict[str, Any] = {}
    for key in ("dispatch_batches", "split_batches", "use_seedable_sampler", "even_batches"):
        if key in arguments:
            accelerator_config[key] = arguments.pop(key)
    arguments["accelerator_config"] = accelerator_config
    if accelerator_config.get("split_batches"):
        arguments["per_device_train_batch_size"] = _split_among(ranks)
    arguments.setdefault("per_device_train_batch_size", BATCH)
    arguments.setdefault("per_device_eval_batch_size", BATCH)
    if is_iterable:
        # Without a length Trainer cannot tell how many steps an epoch has.
        rows_a_step = arguments["per_device_train_batch_size"]
        # With ``split_batches`` that size is already the batch of all ranks together.
        if not accelerator_config.get("split_batches"):
            rows_a_step *= ranks
        arguments["max_steps"] = EPOCHS * _steps(count, rows_a_step, arguments)
    return arguments


def checkpoint_at(start: tuple[int, int], directory: Path) -> str | None:
    """Return the checkpoint that a training from there on resumes; None at the beginning.

    Trainer has named it by its step, such as ``checkpoint-8``. The first of ``RESUME_AT`` has the
    checkpoint with the lowest step.

    Args:
        start: An epoch, and how many of its batches were read before.
        directory: Trainer's output directory.
    """
    if start not in RESUME_AT:
        return None
    saved = sorted(
        directory.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2])
    )
    return str(saved[RESUME_AT.index(start)])


def _training_arguments(
    count: int, directory: Path, settings: Mapping[str, Any], device: str, world: int
) -> Any:
    """Return the ``TrainingArguments`` for one of ``TRAINER_SETTINGS``.

    Args:
        count: The number of rows.
        directory: Checkpoints are saved there.
        settings: Those of ``TRAINER_SETTINGS``.
        device: ``cpu`` or that of this rank.
        world: The number of ranks.
    """
    from transformers import TrainingArguments

    arguments = loader_arguments(settings, count, world)
    return TrainingArguments(
        output_dir=str(directory),
        num_train_epochs=EPOCHS,
        use_cpu=device == "cpu",
        save_strategy="no",
        logging_strategy="no",
        optim="sgd",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        **arguments,
    )


def _trainer(
    count: int,
    directory: Path,
    settings: Mapping[str, Any],
    device: str,
    world: int = 1,
    **more: Any,
) -> Any:
    """Return a Trainer whose model records the rows of each epoch.

    Args:
        count: The number of rows.
        directory: Checkpoints are saved there.
        settings: Those of ``TRAINER_SETTINGS``.
        device: ``cpu`` or that of this rank.
        world: The number of ranks.
        more: Further arguments of Trainer.
    """
    from transformers import PrinterCallback, Trainer

    rows = _numbered(count, tokens=settings.get("train_sampling_strategy") in BY_LENGTH)
    data = trainer_dataset(rows, settings)
    trainer = Trainer(
        model=_recorder(),
        args=_training_arguments(count, directory, settings, device, world),
        train_dataset=data,
        eval_dataset=data,
        data_collator=_joined,
        callbacks=[epochs_callback()],
        **more,
    )
    # It prints the summary of each training.
    trainer.remove_callback(PrinterCallback)
    return trainer


def trainer_rows(
    name: str, count: int, start: _Start, directory: Path, *, world: int, device: str
) -> Batches:
    """Train two epochs, or what is left of them after a checkpoint; yield what this rank read.

    With the loader of evaluations nothing is trained.

    Args:
        name: One of ``TRAINER``.
        count: The number of rows.
        start: Where to begin: an epoch, and how many of its batches were read before.
        directory: Checkpoints are saved there.
        world: The number of ranks.
        device: ``cpu`` or that of this rank.
    """
    trainer = _trainer(count, directory / name, TRAINER_SETTINGS[name], device, world)
    if name == EVALUATION_LOADER:
        for epoch in range(EPOCHS):
            for evaluated in trainer.get_eval_dataloader():
                yield epoch, evaluated["x"].flatten().int().tolist()
        return
    trainer.train(resume_from_checkpoint=checkpoint_at(start, directory / name))
    # A training that resumes has recorded its first epoch as the first list.
    for epoch, batches in enumerate(trainer.model.fed, start[0]):
        for batch in batches:
            yield epoch, [int(row) for row in batch]


def trainer_metrics(count: int, device: str = "cpu") -> dict[str, float]:
    """Return what ``Trainer.evaluate`` computes with each loader.

    It is the loss, how many rows ``compute_metrics`` gets, and the mean of their squares:
    ``{"shuffle: loss": ..., "shuffle: rows": 23.0, "shuffle: mean": ...}``. The loaders left out
    differ in training alone.
    """
    metrics: dict[str, float] = {}

    def compute(evaluation: Any) -> dict[str, float]:
        rows = evaluation.predictions
        squares = rows.astype("float64") ** 2
        return {"rows": len(rows), "mean": float(squares.mean())}

    # Trainer makes its output directory, although it saves nothing.
    with tempfile.TemporaryDirectory() as directory:
        for name in ("shuffle", "dispatch_batches", "iterable", "iterable, dispatch_batches=False"):
            trainer = _trainer(
                count, Path(directory), TRAINER_SETTINGS[name], device, compute_metrics=compute
            )
            evaluated = trainer.evaluate()
            for key in ("loss", "rows", "mean"):
                value = evaluated[f"eval_{key}"]
                metrics[f"{name}: {key}"] = float(value)
    return metrics


#: Name of a loader of DeepSpeed -> what it must do. DeepSpeed makes the loader of
#: ``training_data`` itself; it cannot be resumed.
DEEPSPEED: dict[str, Loader] = {
    "training_data": Loader(resumes=False, moves=False),
}


def deepspeed_rows(count: int, backend: str) -> Batches:
    """Read the loader that ``deepspeed.initialize`` returns.

    Args:
        count: The number of rows.
        backend: Of the process group: ``gloo`` or ``nccl``.
    """
    import deepspeed
    import torch

    from pytest_distcompat.launch.deepspeed_cpu import init_distributed

    init_distributed(backend)
    model = torch.nn.Linear(1, 1)
    config = {"train_micro_batch_size_per_gpu": BATCH}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, training_data=range(count)
    )
    yield from _read(loader)


def _read(loader: Any) -> Batches:
    """Yield the batches of a loader in each epoch."""
    for epoch in range(EPOCHS):
        length = _length(loader)
        for batch in loader:
            yield LoadedBatch(epoch, batch.tolist(), length)


def deepspeed_engine_rows(engine: Any, count: int) -> Batches:
    """Read the loader that an engine makes of a data set.

    For cells whose engine is on a mesh: which rows a rank reads depends on it.

    Args:
        engine: A ``DeepSpeedEngine`` that the driver has built.
        count: The number of rows.
    """
    yield from _read(engine.deepspeed_io(range(count), batch_size=BATCH))


def deepspeed_pipeline_rows(engine: Any) -> Batches:
    """Read the loader that a ``PipelineEngine`` has made of its ``training_data``.

    The engine has it in a ``RepeatingLoader``, which never ends. Stages between the first and the
    last read nothing: they are given what the first one sends.

    Args:
        engine: The engine.
    """
    from torch import distributed

    batches: list[Any] = []
    if engine.is_first_stage() or engine.is_last_stage():
        batches = list(_read(engine.training_dataloader.loader))
    message = [batches]
    group = engine.grid.get_pipe_parallel_group()
    distributed.broadcast_object_list(message, group=group, group_src=0)
    if not batches:
        batches = message[0]
    yield from batches


#: The loader of a data set that deals its files out to ranks, see ``_iterables``.
BY_RANK = "iterable by rank"
#: Loaders of torch and torchdata that keep a state per rank -> their number of workers.
TORCH_STATEFUL: dict[str, int] = {BY_RANK: 0}
if version_of("torchdata"):
    TORCH_STATEFUL |= {
        "StatefulDataLoader": 0,
        "StatefulDataLoader, num_workers=2": 2,
        f"StatefulDataLoader, {BY_RANK}": 0,
        f"StatefulDataLoader, {BY_RANK}, num_workers=2": 2,
    }
#: Name of a loader of torch -> what it must do. The first are torch's own, as its tutorials make
#: them: with a DistributedSampler and ``set_epoch``.
TORCH: dict[str, Loader] = {
    "shuffle": Loader(),
    "in order": Loader(shuffled=False),
    "drop_last": Loader(filled=False, dropped=True, moves=False),
    "one row": Loader(shuffled=False, resumes=False, moves=False, rows=1),
}
for _name in TORCH_STATEFUL:
    # The state of a rank is of no use to other ranks. Nothing makes ranks equal that read files.
    TORCH[_name] = Loader(filled=BY_RANK not in _name, moves=False)


def torch_rows(name: str, count: int, start: _Start, rank: int, ranks: int) -> Batches:
    """Read a loader with torch's DistributedSampler, and skip the batches that were read before.

    torch's loader saves nothing to resume from, so that ``start`` alone says where to go on.

    Args:
        name: One of ``TORCH``.
        count: The number of rows.
        start: Where to begin: an epoch, and how many of its batches were read before.
        rank: Which of the ranks with different rows this is.
        ranks: The number of ranks with different rows.
    """
    from torch.utils.data import DataLoader, DistributedSampler

    dropped = TORCH[name].dropped
    data: Any = range(count)
    sampler: DistributedSampler[int] = DistributedSampler(
        data, ranks, rank, TORCH[name].shuffled, drop_last=dropped
    )
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=dropped)
    for epoch in range(start[0], EPOCHS):
        sampler.set_epoch(epoch)
        skipped = 0
        if epoch == start[0]:
            skipped = start[1]
        for number, batch in enumerate(loader):
            if number >= skipped:
                yield LoadedBatch(epoch, batch.tolist(), len(loader) - skipped)
