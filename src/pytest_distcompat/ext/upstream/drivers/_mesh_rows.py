"""Rows that Trainer feeds ranks on a mesh, which it makes around the model that it trains.

The check ``coverage`` compares which rows of a data set each rank reads with what a loader must do
(``trace.Loader``). ``TrainerDriver`` calls ``loaders`` for the loaders that a cell can test, and
``rows_on_mesh`` on each rank. Both are for cells on a mesh, as ``fsdp2-fp32-w4-tp_2``: there which
rows a rank reads depends on the mesh, and Trainer makes it of the model. So the cell's own model of
tokens is trained here; on other cells ``_rows.py`` trains a model of one parameter.

A row is a number, and all its tokens are that number: row 7 is ``[7, 7, 7, 7]``. A hook on the
model records the first token of each row of a batch. ``rows_on_mesh`` yields (epoch, rows) for each
batch, such as ``(0, [7, 2])``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.driver import Plan
from pytest_distcompat.ext.upstream.drivers import _rows
from pytest_distcompat.parallel import context_parallel
from pytest_distcompat.trace import Loader

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell

#: How many tokens a row has when it reaches the model.
TOKENS = 4


#: The loaders that are tested on a mesh where several ranks hold the parts of one model: those that
#: such ranks may change. To read a loader is to train the whole model, so the others are tested
#: only on a mesh without such ranks.
ON_A_MESH = frozenset(
    {
        "shuffle",
        "dispatch_batches",
        "split_batches",
        "iterable",
        "iterable, dispatch_batches=False",
        "iterable, dataloader_drop_last",
        "group_by_length",
        "dataloader_num_workers=1",
        "get_eval_dataloader",
    }
)
#: Further loaders that are tested on such a mesh if it also has ranks that read different rows.
WHERE_ROWS_ARE_DIVIDED = frozenset(
    {"dispatch_batches, dataloader_drop_last", "even_batches=False, dataloader_drop_last"}
)


def loaders(cell: Cell) -> Mapping[str, Loader]:
    """Return Trainer's loaders on the cell's mesh: name -> what the loader must do."""
    by_name: dict[str, Loader] = {}
    for name, loader in _rows.TRAINER.items():
        if _is_tested(name, cell):
            by_name[name] = _on_mesh(name, loader, cell)
    return by_name


def _is_tested(name: str, cell: Cell) -> bool:
    """Tell whether Trainer's loader of that name is tested on the cell's mesh."""
    # Batches of ranks of one model differ even in their size, so that such a training ends in a
    # crash: docs/upstream/transformers_rebalance_mesh.py.
    if name == "batch_rebalance" and cell.dp_size < cell.world_size:
        return False
    # ``cp`` is DeepSpeed's Ulysses in Trainer's cells. It expects the batch before it is split, and
    # its ranks do not evaluate together.
    if cell.cp > 1 and ("split_batches" in name or name == _rows.EVALUATION_LOADER):
        return False
    if not _splits_model(cell):
        return True
    return name in ON_A_MESH or (name in WHERE_ROWS_ARE_DIVIDED and cell.dp_size > 1)


def _splits_model(cell: Cell) -> bool:
    """Tell whether several ranks hold the parts of one model's layers, experts or sequences."""
    return cell.tp * cell.cp * cell.ep > 1


def _on_mesh(name: str, loader: Loader, cell: Cell) -> Loader:
    """Return what a loader must do on the cell's mesh.

    Args:
        name: The name of the loader.
        loader: What it must do where each rank has a whole model. A loader ``resumes`` in a fresh
            process group, also in the middle of an epoch (``midway``), also with another number of
            ranks (``moves``).
        cell: The cell.
    """
    if _splits_model(cell):
        # Two full batches of each data parallel rank, and a last step that is not full.
        loader = dataclasses.replace(loader, rows=2 * _rows.BATCH * cell.dp_size + 3)
    if cell.tp * cell.ep > 1:
        # transformers shards the model while it loads it: such a training cannot be resumed.
        return dataclasses.replace(loader, resumes=False, moves=False)
    if cell.cp > 1:
        # Batches of Ulysses cannot be skipped (docs/upstream/accelerate_ulysses_skip.py), as
        # Trainer does for each data set without a length.
        resumes = loader.resumes and "iterable" not in name
        return dataclasses.replace(loader, resumes=resumes, midway=False, turns=cell.cp)
    return loader


def rows_on_mesh(
    driver: Any, name: str, count: int, start: tuple[int, int], directory: Path
) -> Iterator[tuple[int, Sequence[int]]]:
    """Train two epochs on the cell's mesh, or what is left of them; yield what this rank read.

    Args:
        driver: The ``TrainerDriver`` of the cell.
        name: One of the loaders.
        count: The number of rows.
        start: Where to begin: an epoch, and how many of its batches were read before.
        directory: Checkpoints are saved there.
    """
    place = directory / name
    # ``in_parts``: transformers shards the model while it loads it.
    model: Any = driver.model_on_mesh(driver.build_model())
    # Of the loader ``sequential``, for example: ``{"train_sampling_strategy": "sequential"}``.
    settings = _rows.TRAINER_SETTINGS[name]
    data = _dataset(count, settings)
    trainer = driver.make_trainer(
        model=model,
        args=_arguments(driver, settings, count, place),
        train_dataset=data,
        eval_dataset=data,
        data_collator=_collated,
        callbacks=[_rows.epochs_callback(saves=not driver.in_parts)],
    )
    # The loader that Trainer evaluates with: no training reads it.
    if name == _rows.EVALUATION_LOADER:
        for epoch in range(_rows.EPOCHS):
            for evaluated in trainer.get_eval_dataloader():
                yield epoch, evaluated["input_ids"][:, 0].tolist()
        return
    # A list for each epoch, of the batches with their rows. ``epochs_callback`` appends an empty
    # list when an epoch begins.
    model.fed = []
    hook = model.register_forward_pre_hook(_record, with_kwargs=True)
    # None at the beginning of the training.
    checkpoint = _rows.checkpoint_at(start, place)
    ulysses: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if driver.cell.cp > 1:
        ulysses = context_parallel.one_ulysses_of_several()
    try:
        with ulysses:
            trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        hook.remove()
    # A training that resumes has recorded its first epoch as the first list.
    for epoch, batches in enumerate(model.fed, start[0]):
        for batch in batches:
            yield epoch, batch


def _record(module: Any, _args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Record which rows a batch has, as a hook of the model."""
    # An evaluation reads rows of its own.
    if module.training:
        module.fed[-1].append(kwargs["input_ids"][:, 0].tolist())


def _dataset(count: int, settings: Mapping[str, Any]) -> Any:
    """Return rows that hold their own number, from one to five times.

    A loader may group rows by length.
    """
    import torch

    rows = []
    for number in range(count):
        rows.append({"input_ids": torch.full((1 + number % 5,), number)})
    return _rows.trainer_dataset(rows, settings)


def _collated(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collate rows to a batch, all of the length ``TOKENS``."""
    import torch

    tokens = torch.stack([row["input_ids"][:1].repeat(TOKENS) for row in rows])
    # Ulysses, which cuts sequences, needs the place of each token.
    positions = torch.arange(TOKENS).repeat(len(rows), 1)
    return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": positions}


def _arguments(driver: Any, settings: Mapping[str, Any], count: int, directory: Path) -> Any:
    """Return the ``TrainingArguments`` of the cell with those of a loader.

    Args:
        driver: The ``TrainerDriver`` of the cell.
        settings: Those of the loader, of ``_rows.TRAINER_SETTINGS``.
        count: The number of rows.
        directory: Checkpoints are saved there.
    """
    from transformers import TrainingArguments

    # Any plan with a step: the arguments that follow from it are overridden.
    plan = Plan(("build", "step"), first_step=0, save_to=directory, load_from=directory)
    arguments = driver.arguments(plan)
    # The driver's trainings sample in order; each loader has a strategy of its own.
    del arguments["train_sampling_strategy"]
    ranks = driver.cell.dp_size
    of_loader = _rows.loader_arguments(settings, count, ranks)
    accelerator_config = arguments.pop("accelerator_config", {}) | of_loader["accelerator_config"]
    arguments |= {
        "max_steps": -1,
        "num_train_epochs": _rows.EPOCHS,
        "logging_strategy": "no",
        **of_loader,
        "accelerator_config": accelerator_config,
    }
    return TrainingArguments(**arguments)
