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

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_distcompat.driver import Plan
from pytest_distcompat.ext.upstream.drivers import _rows
from pytest_distcompat.trace import Loader

#: How many tokens a row has when it reaches the model.
TOKENS = 4


def loaders(*, in_parts: bool) -> Mapping[str, Loader]:
    """Return Trainer's loaders on a mesh: name -> what the loader must do.

    Args:
        in_parts: Whether transformers shards the model while it loads it: such a training cannot be
            resumed.
    """
    if not in_parts:
        return _rows.TRAINER
    not_resumed: dict[str, Loader] = {}
    for name, loader in _rows.TRAINER.items():
        not_resumed[name] = dataclasses.replace(loader, resumes=False, moves=False)
    return not_resumed


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
    model: Any = driver.model_on_mesh(driver.build_model())
    # Of the loader ``sequential``, for example: ``{"train_sampling_strategy": "sequential"}``.
    settings = _rows.TRAINER_SETTINGS[name]
    trainer = driver.make_trainer(
        model=model,
        args=_arguments(driver, settings, count, place),
        train_dataset=_dataset(count, settings),
        data_collator=_collated,
        callbacks=[_rows.epochs_callback()],
    )
    # A list for each epoch, of the batches with their rows. ``epochs_callback`` begins an epoch.
    model.fed = []
    hook = model.register_forward_pre_hook(_record, with_kwargs=True)
    # None at the beginning of the training.
    checkpoint = _rows.checkpoint_at(start, place)
    try:
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
    return _rows.iterable(rows) if settings.get("iterable") else rows


def _collated(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collate rows to a batch, all of the length ``TOKENS``."""
    import torch

    tokens = torch.stack([row["input_ids"][:1].repeat(TOKENS) for row in rows])
    return {"input_ids": tokens, "labels": tokens.clone()}


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
