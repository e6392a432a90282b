"""Wrappers of Lightning's Trainer: its checkpoints, which it writes through a buffer and a file system of its own.

https://lightning.ai/docs/pytorch/stable/common/trainer.html
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from pytest_distcompat.scripts import wrappers
from pytest_distcompat.scripts.wrappers import Arguments, Keywords

#: Lightning is installed under two names, each with classes of its own.
PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def trainer(module: ModuleType) -> None:
    """Wrap ``Trainer.save_checkpoint``, which all ranks call, Lightning's own callbacks included."""
    wrappers.wrap_attribute(module.Trainer, "save_checkpoint", wrappers.saves(_path))


def strategies(module: ModuleType) -> None:
    """Wrap ``load_checkpoint`` of each strategy that defines it: ``fit(ckpt_path=...)`` reads by it."""
    for kind in vars(module).values():
        if isinstance(kind, type) and "load_checkpoint" in vars(kind):
            wrappers.wrap_attribute(kind, "load_checkpoint", wrappers.loads)


def _path(_result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Return ``filepath`` of ``save_checkpoint(self, filepath, weights_only=None, ...)``."""
    return args[1] if len(args) > 1 else kwargs.get("filepath")
