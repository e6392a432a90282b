"""Reader of a live trainer: everything that a Snapshot records after an action."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_distcompat.probe.live import read_model, require_module
from pytest_distcompat.probe.numbers import peak_memory, read_rng, read_scaler
from pytest_distcompat.probe.optimizer import read_optimizer, read_scheduler

if TYPE_CHECKING:
    from torch.nn import Module


def read_snapshot_fields(
    model: Module,
    optimizer: Any,
    *,
    device: str,
    scheduler: Any = None,
    scaler: Any = None,
    trainer_world_size: int | None = None,
    whole: bool,
    without_gradient: frozenset[int] = frozenset(),
    pp_group: Any = None,
) -> dict[str, Any]:
    """Return the fields of a Snapshot that come from a live trainer, with all values or (not ``whole``) only numbers.

    ``optimizer`` and ``scheduler`` may be lists of several. ``device`` is this rank's own: ``cuda:1``.
    ``without_gradient`` has the ``id`` of each tensor that had no gradient in the optimizer's steps; the model is a stage of
    the pipeline that the ranks of ``pp_group`` hold. Raises TypeError for something else.
    """
    require_module(model, "the driver's self.model", "build() is to set it to the model as the trainer has it")
    fields: dict[str, Any] = {"scheduler": read_scheduler(scheduler), "memory": peak_memory(device)}
    if optimizer is not None:
        fields["optimizer"] = read_optimizer(model, optimizer, whole=whole, without_gradient=without_gradient)
    if whole:
        fields["model"] = read_model(model, optimizer, trainer_world_size, pp_group)
        fields["rng"] = read_rng(device)
        fields["scaler"] = read_scaler(scaler, optimizer)
    return fields
