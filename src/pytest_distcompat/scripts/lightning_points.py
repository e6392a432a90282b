"""The points of Lightning's Trainer: its checkpoints, which it writes through a buffer and a file system of its own.

https://lightning.ai/docs/pytorch/stable/common/trainer.html
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from pytest_distcompat.scripts import around
from pytest_distcompat.scripts.around import Arguments, Keywords

#: Lightning comes under two names, each with classes of its own.
PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def trainer(module: ModuleType) -> None:
    """``Trainer.save_checkpoint``, which all ranks call, callbacks of Lightning's own too."""
    around.put(module.Trainer, "save_checkpoint", around.saves(_path))


def strategies(module: ModuleType) -> None:
    """``Strategy.load_checkpoint``, by which ``fit(ckpt_path=...)`` reads: of each strategy that has one of its own."""
    for kind in vars(module).values():
        if isinstance(kind, type) and "load_checkpoint" in vars(kind):
            around.put(kind, "load_checkpoint", around.loads)


def _path(_result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """``save_checkpoint(self, filepath, weights_only=None, ...)``."""
    return args[1] if len(args) > 1 else kwargs.get("filepath")
