"""Cells of the matrix: strategy x precision x world size x options.

``cell`` has a single one, such as ``fsdp2-bf16_upcast-w2-compile``; ``options`` lists the options
and their values; ``settings`` reads settings of libraries, which one of the options has; ``matrix``
turns the lists that a suite declares into cells.
"""

from pytest_distcompat.cell.cell import Cell
from pytest_distcompat.cell.matrix import Matrix
from pytest_distcompat.cell.options import FACETS, OPTIONS, Option, OptionValue, check_option
from pytest_distcompat.cell.settings import setting_value

__all__ = [
    "FACETS",
    "OPTIONS",
    "Cell",
    "Matrix",
    "Option",
    "OptionValue",
    "check_option",
    "setting_value",
]
