"""Registry of the tiny models that drivers of common libraries train.

``ext.upstream`` adds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_distcompat.cell import Cell
from pytest_distcompat.models._base import Stages, TinyModel, prompt_length
from pytest_distcompat.registry import Registry

if TYPE_CHECKING:
    # A type that needs torch.
    from pytest_distcompat.models._base import Batch as Batch


@dataclass(frozen=True)
class ModelFamily:
    """Models that are made of their names, ``NAME:MODEL``.

    Attributes:
        name: What stands before the colon.
        make: Returns the model of a whole name.
    """

    name: str
    make: Callable[[str], TinyModel]


MODELS: Registry[TinyModel] = Registry(__name__, TinyModel, "model", has_modules=False)
FAMILIES: Registry[ModelFamily] = Registry(
    "pytest_distcompat.model_families", ModelFamily, "family of models", has_modules=False
)
#: Names of the models that are a Llama.
LLAMAS = ("llama", "llama_tied", "llama_dropout")

__all__ = [
    "FAMILIES",
    "LLAMAS",
    "MODELS",
    "ModelFamily",
    "Stages",
    "TinyModel",
    "known_model",
    "model_of",
    "prompt_length",
]


def model_of(cell: Cell) -> TinyModel:
    """Return the model of a cell. Raises UsageProblem if there is none of that name."""
    name = str(cell.option("model"))
    family, colon, _ = name.partition(":")
    if colon:
        return FAMILIES.get(family).make(name)
    return MODELS.get(name)


def known_model(cell: Cell) -> TinyModel | None:
    """Return the model of a cell, None if there is none.

    Without the models of ``ext.upstream`` every driver has a model of its own.
    """
    name = str(cell.option("model"))
    if name in MODELS.by_name or ":" in name:
        return model_of(cell)
    return None
