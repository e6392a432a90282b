"""The profile ``zoo``: the architectures of transformers, each under one strategy of each kind.

A profile decides which cells of a suite a session has, and which checks run in them. A cell is one
configuration of the suite's driver, the class by which a trainer is tested. With ``pytest --pyargs
pytest_distcompat.suite --distcompat-profile zoo`` the core calls ``PROFILE``, which an entry point
names: ``_cells`` yields ``ddp-fp32-w2-model_hf:gpt2``, ``fsdp2-fp32-w2-model_hf:gpt2``, and so on
for each architecture, in place of the suite's matrix; ``_left_out`` leaves out checks that do not
depend on the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.upstream.models import architectures
from pytest_distcompat.profiles import AddedProfile, LeftOut, Selection

#: The strategies under which each architecture is run: one of each kind.
ZOO_STRATEGIES = ("ddp", "fsdp2", "zero3")
#: The checks that are run: those that may depend on the model's modules.
ZOO_CHECKS = ("active", "names", "resume", "parity", "gradients", "export")


def _cells(selection: Selection) -> Iterator[Cell]:
    """Yield each architecture under each of ``ZOO_STRATEGIES``.

    There is none for a driver with a model of its own.

    Args:
        selection: The suite's driver, strategies and number of ranks.
    """
    if "model" not in selection.driver.options:
        return
    for model in architectures():
        for strategy in ZOO_STRATEGIES:
            if strategy in selection.strategies:
                yield Cell.of(strategy, "fp32", selection.world_size, model=model)


def _left_out(applicable: Mapping[Cell, Collection[str]]) -> LeftOut:
    """Return (cell, check) -> the reason why the check is not run: for all but ``ZOO_CHECKS``.

    Args:
        applicable: Cell -> the checks that apply to it.
    """
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
