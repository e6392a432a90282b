"""Registry of the tiny models that the built-in drivers train; they are made from a config, without a download."""

from typing import TYPE_CHECKING

from pytest_distcompat.cell import Cell
from pytest_distcompat.models._architectures import PREFIX, architecture, architectures, of_tasks
from pytest_distcompat.models._base import TinyModel
from pytest_distcompat.models._blank import BLANK, BLANK_TASKS
from pytest_distcompat.models._inputs import loss_to_targets
from pytest_distcompat.registry import Registry

if TYPE_CHECKING:
    # Types that need torch.
    from pytest_distcompat.models._base import Batch as Batch
    from pytest_distcompat.models._base import Stages as Stages

MODELS: Registry[TinyModel] = Registry(__name__, TinyModel, "model")

__all__ = [
    "BLANK",
    "BLANK_TASKS",
    "MODELS",
    "TinyModel",
    "architecture",
    "architectures",
    "loss_to_targets",
    "model_of",
    "of_tasks",
]


def model_of(cell: Cell) -> TinyModel:
    """Return the model of a cell."""
    name = str(cell.option("model"))
    if name.startswith(PREFIX):
        return architecture(name)
    return MODELS.get(name)
