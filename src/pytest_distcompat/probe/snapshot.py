"""Everything that is read of a live trainer after an action, as the fields of a Snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_distcompat.probe.live import as_module, read_model
from pytest_distcompat.probe.numbers import peak_memory, read_rng, read_scaler
from pytest_distcompat.probe.optimizer import read_optimizer, read_scheduler

if TYPE_CHECKING:
    from torch.nn import Module


def look(
    model: Module,
    optimizer: Any,
    *,
    device: str,
    scheduler: Any = None,
    scaler: Any = None,
    trainer_world_size: int | None = None,
    whole: bool,
) -> dict[str, Any]:
    """What stands in ``model``, ``optimizer`` and the rest, each as the trainer has it; if not ``whole``, numbers only.

    ``device`` is the rank's own: ``cpu``, ``cuda:1``.
    """
    as_module(model, "the driver's self.model", "build() is to set it to the model as the trainer has it")
    infos: dict[str, Any] = {"scheduler": read_scheduler(scheduler), "memory": peak_memory(device)}
    if optimizer is not None:
        infos["optimizer"] = read_optimizer(model, optimizer, whole=whole)
    if whole:
        infos["model"] = read_model(model, optimizer, trainer_world_size)
        infos["rng"] = read_rng(device)
        infos["scaler"] = read_scaler(scaler, optimizer)
    return infos
