"""``Precision``: the dtypes that a model is loaded, computed and optimized in.

``fp32.py``, ``bf16.py``, ``fp16.py`` and ``fp8.py`` make them. A cell, one configuration under
test, names one: ``fsdp2-bf16_upcast-w2``. Drivers, the classes by which trainers are tested, load
the model in ``load`` and configure their library for ``compute``. Checks compare dtypes that they
read on the ranks with those of the strategy (``Strategy.dtypes(precision)``), and losses and
gradient norms with a reference in float32, within the tolerances.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from pytest_distcompat.cell import Cell


@dataclass(frozen=True)
class Precision:
    """Dtypes, by torch's names, and tolerances.

    A precision is mixed if ``compute`` and ``master`` differ; the strategy then decides what it
    stores and reduces in.
    """

    #: The name in a cell's id: ``bf16_upcast``.
    name: str
    #: The dtype in which the trainer gets the model: ``bfloat16``.
    load: str
    #: The dtype of matrix products.
    compute: str
    #: The dtype of the weights that the optimizer updates, and of its state.
    master: str
    #: One line for the documentation.
    meaning: str
    #: How far a loss may be from the reference's, relative to it, over 20 steps: docs/checks.md.
    loss_tolerance: float
    #: The same of gradient norms.
    norm_tolerance: float
    #: Whether linear layers multiply in 8 bits; their output is in ``compute``.
    float8: bool = False
    #: Position in lists.
    order: int = 0

    @property
    def mixed(self) -> bool:
        """Tell whether the optimizer works in another dtype than the matrix products."""
        return self.compute != self.master

    @property
    def scaled(self) -> bool:
        """Tell whether small gradients would vanish without a scaled loss."""
        return self.compute == "float16"

    def unsupported_reason(self, cell: Cell, device: str) -> str | None:
        """Return why the cell cannot run on that device; None if it can.

        fp8 needs a package that may not be installed: torchao, or Transformer Engine (``te``).

        Args:
            cell: The cell, of this precision.
            device: ``cpu`` or ``cuda``.
        """
        te = cell.option("fp8_backend") == "te"
        if te and not self.float8:
            return "option fp8_backend is for precision fp8"
        if not self.float8:
            return None
        package = "torchao"
        module = "torchao"
        if te:
            package = "Transformer Engine"
            module = "transformer_engine"
        if not installed(module):
            return f"fp8 needs {package}, which is not installed"
        # Its kernels for torch are a CUDA extension, a module of their own.
        if te and device == "cpu" and installed("transformer_engine_torch"):
            return "Transformer Engine needs a GPU"
        return None


def installed(module: str) -> bool:
    """Tell whether a module is installed, without importing it.

    An empty package (Transformer Engine's) is not one.
    """
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
