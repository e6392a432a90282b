"""What a precision is."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat.cell import Cell


@dataclass(frozen=True)
class Precision:
    """Dtypes by torch's names: what the user loads in, what the matrix products run in, what the optimizer works in.

    ``load`` is the dtype of the model as the trainer gets it; ``compute`` that of forward and backward; ``master`` that
    of the values the optimizer updates and of its state. A precision is mixed where compute and master differ; then
    the strategy says what it stores and reduces in. ``float8`` says that linear layers multiply in 8 bits, and give out
    ``compute``.

    ``loss_tolerance`` and ``norm_tolerance`` are how far losses and gradient norms may be from a float32 reference over 20
    steps, relative to it. They stand between what sound runs were seen to differ by and what the next lower precision
    was: docs/checks.md has the figures.
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
        """Whether the optimizer works in another dtype than the matrix products."""
        return self.compute != self.master

    @property
    def scaled(self) -> bool:
        """Whether small gradients would vanish without a scaled loss."""
        return self.compute == "float16"

    def unsupported_reason(self, cell: Cell, device: str) -> str | None:
        """Why the cell cannot be run on that device: what its 8 bits need is not installed, or is for GPUs only."""
        if not self.float8:
            return "option fp8_backend is for precision fp8" if cell.option("fp8_backend") == "te" else None
        te = cell.option("fp8_backend") == "te"
        package, module = ("Transformer Engine", "transformer_engine") if te else ("torchao", "torchao")
        if not installed(module):
            return f"fp8 needs {package}, which is not installed"
        if te and device == "cpu" and not stand_in(module):
            return "Transformer Engine needs a GPU"
        return None


def installed(module: str) -> bool:
    """Whether there is such a module; nothing is imported. The empty meta package of Transformer Engine is not one."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def stand_in(module: str) -> bool:
    """Whether the module is a stand-in that tests made for a machine without a GPU: it says so in a file beside it."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / "STAND_IN").exists()
