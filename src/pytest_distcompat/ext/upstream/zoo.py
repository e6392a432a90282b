"""The profile ``zoo``: the architectures of transformers, each under one strategy of each kind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.upstream.models import architectures
from pytest_distcompat.profiles import AddedProfile, LeftOut, Selection

#: What the profile ``zoo`` runs of each architecture: one strategy of each kind, and what may
#: depend on the model's modules.
ZOO_STRATEGIES = ("ddp", "fsdp2", "zero3")
ZOO_CHECKS = ("active", "names", "resume", "parity", "gradients", "export")


def _cells(selection: Selection) -> Iterator[Cell]:
    """Yield each architecture under each of ``ZOO_STRATEGIES``.

    There is none for a driver with a model of its own.
    """
    if "model" not in selection.driver.options:
        return
    for model in architectures():
        for strategy in ZOO_STRATEGIES:
            if strategy in selection.strategies:
                yield Cell.of(strategy, "fp32", selection.world_size, model=model)


def _left_out(applicable: Mapping[Cell, Collection[str]]) -> LeftOut:
    """Return all checks but ``ZOO_CHECKS``, by (cell, check), each with the reason."""
    reasons: LeftOut = {}
    for cell, checks in applicable.items():
        for check in checks:
            if check not in ZOO_CHECKS:
                reasons[cell, check] = f"the zoo profile runs {', '.join(ZOO_CHECKS)} only"
    return reasons


PROFILE = AddedProfile(
    "zoo",
    (
        "every causal language model of transformers and one class of each other task, "
        "under DDP, FSDP2 and ZeRO-3"
    ),
    _cells,
    left_out=_left_out,
    order=1,
)
