"""The points of Lightning's Trainer: its checkpoints, which it writes through a buffer and a file system of its own.

https://lightning.ai/docs/pytorch/stable/common/trainer.html
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from pytest_distcompat.scripts import wrappers
from pytest_distcompat.scripts.wrappers import Arguments, Keywords

#: Lightning comes under two names, each with classes of its own.
PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def trainer(module: ModuleType) -> None:
    """``Trainer.save_checkpoint``, which all ranks call, callbacks of Lightning's own too."""
    wrappers.put(module.Trainer, "save_checkpoint", wrappers.saves(_path))


def strategies(module: ModuleType) -> None:
    """``Strategy.load_checkpoint``, by which ``fit(ckpt_path=...)`` reads: of each strategy that has one of its own."""
    for kind in vars(module).values():
        if isinstance(kind, type) and "load_checkpoint" in vars(kind):
            wrappers.put(kind, "load_checkpoint", wrappers.loads)


def _path(_result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """``save_checkpoint(self, filepath, weights_only=None, ...)``."""
    return args[1] if len(args) > 1 else kwargs.get("filepath")
