"""Precision: the dtypes that a model is loaded, computed and optimized in."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from pytest_distcompat.cell import Cell


@dataclass(frozen=True)
class Precision:
    """Dtypes, by torch's names, and tolerances.

    A precision is mixed if ``compute`` and ``master`` differ; the strategy then decides what it
    stores and reduces in. The trainer gets a model in ``load``. ``master`` is also the dtype of
    optimizer state. Tolerances are relative, over 20 steps: docs/checks.md. With ``float8`` linear
    layers multiply in 8 bits; their output is in ``compute``.
    """

    name: str
    load: str
    compute: str
    master: str
    meaning: str
    loss_tolerance: float
    norm_tolerance: float
    float8: bool = False
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

        One reason is that a package is not installed which fp8 needs.
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
