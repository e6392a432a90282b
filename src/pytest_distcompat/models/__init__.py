"""Registry of the tiny models that drivers of common libraries train.

A cell, one configuration under test, names its model: ``fsdp2-fp32-w2-model_mlp``; without a name
it is ``llama``, or ``mlp`` where transformers is not installed. ``model_of(cell)`` returns its
``TinyModel``, by which a driver, the class that tests a trainer, makes the model, its batches and
its loss. The core has no model of its own: those of ``ext.upstream`` are added by the entry point
groups ``pytest_distcompat.models`` and ``pytest_distcompat.model_families``; the latter has models
that are made of their names, as ``hf:gpt2``. A user's driver has a model of its own, and needs none
of these.

For modules that define models, ``Stages`` and ``LayerByLayer`` say how a model is cut for a
pipeline of torch or of DeepSpeed, and ``prompt_length`` how many tokens at the start of a row are
not trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_distcompat.cell import Cell
from pytest_distcompat.models._base import LayerByLayer, Stages, TinyModel, prompt_length
from pytest_distcompat.registry import Registry

if TYPE_CHECKING:
    # A type that needs torch. ``as`` tells type checkers that this module offers it to others.
    from pytest_distcompat.models._base import Batch as Batch


@dataclass(frozen=True)
class ModelFamily:
    """Models that are made of their names, ``NAME:MODEL``.

    Attributes:
        name: What stands before the colon: ``hf``.
        make: Returns the model of a whole name: ``hf:gpt2``.
    """

    name: str
    make: Callable[[str], TinyModel]


# ``has_modules=False``: no module of this package defines any; all come from entry points.
#: The models by name: ``llama``, ``mlp``.
MODELS: Registry[TinyModel] = Registry(__name__, TinyModel, "model", has_modules=False)
#: The families by name: ``hf``.
FAMILIES: Registry[ModelFamily] = Registry(
    "pytest_distcompat.model_families", ModelFamily, "family of models", has_modules=False
)
#: Names of the models that are a Llama: context and tensor parallelism have rules for them alone.
LLAMAS = ("llama", "llama_tied", "llama_dropout")

__all__ = [
    "FAMILIES",
    "LLAMAS",
    "MODELS",
    "LayerByLayer",
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
    """Return the model of a cell; None if no model of that name is registered.

    That is so without the models of ``ext.upstream``: every driver has a model of its own then.

    Raises:
        UsageProblem: The name has a family that does not exist, as ``hg:gpt2``. A user has written
            it: no default has a colon.
    """
    name = str(cell.option("model"))
    if name in MODELS.by_name or ":" in name:
        return model_of(cell)
    return None
