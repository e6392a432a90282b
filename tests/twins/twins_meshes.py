"""Checkpoints, exported files and memory of trainers on a mesh: wrong along one of its dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.upstream.drivers import _options

from .declare import Torch, twin
from .twins_checkpoints import CorruptsAtFour

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch.nn import Module

    from pytest_distcompat.precisions import Precision


def forget(driver: Torch, name: str) -> None:
    """Zero this rank's part of the optimizer's state for one parameter."""
    state = driver.optimizer.state[driver.model.get_parameter(name)]
    state["exp_avg"].to_local().zero_()


@twin(
    "reshard",
    "fsdp2-fp32-w4-model_mlp-tp_2",
    match=r"^exp_avg 'blocks\.0\.linear\.weight': other values after the load at 4 ranks with tp 4$",
)
class LastOfFourParts(Torch):
    """Saved in two parts of each layer, loaded without, and back in four, of which the last has state of its own making."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        if self.cell.tp == 4 and self.world.rank == 3:
            forget(self, "blocks.0.linear.weight")


@twin(
    "reshard",
    "fsdp2-fp32-w2-pp_2",
    match=r"^exp_avg 'lm_head\.weight': other values after the load at 2 ranks$",
)
class LastStageNotRead(Torch):
    """Ranks with the whole model read what the first stage saved alone."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        if self.cell.pp == 1 and self.world.size == 2:
            forget(self, "lm_head.weight")


@twin("reshard", "fsdp2-fp32-w2-cp_2", match=r"^exp_avg 'lm_head\.weight': other values after the load at 4 ranks$")
@twin(
    "reshard",
    "fsdp2-fp32-w2-model_moe_fused-ep_2",
    match=r"^exp_avg 'experts\.weight': other values after the load at 4 ranks$",
)
class LastRankOfMore(CorruptsAtFour):
    """The last of twice as many ranks has state of its own making."""

    def corrupt(self) -> None:
        if self.world.rank == 3:
            forget(self, "experts.weight" if self.cell.ep > 1 else "lm_head.weight")


@twin("export", "fsdp2-fp32-w2-pp_2", match=r"^\d+ of \d+ names are in no exported file, first ")
class FirstStageExported(Torch):
    """The stages are not gathered: the first exports what it has."""

    def export(self, directory: Path) -> None:
        state = _options.whole_state(self.model)
        if self.world.rank == 0:
            _options.write_whole(self.raw, state, directory)


@twin(
    "export",
    "fsdp2-fp32-w2-model_moe_fused-ep_2",
    match=r"^parameter 'experts\.weight': other values after the reload",
)
class ExpertsOfTheFirstExported(Torch):
    """The experts of the first rank are exported for those of all."""

    def export(self, directory: Path) -> None:
        state = _options.whole_state(self.model)
        if self.world.rank == 0:
            own = state["experts.weight"].chunk(self.cell.ep)[0]
            state["experts.weight"] = own.repeat(self.cell.ep, 1, 1)
            _options.write_whole(self.raw, state, directory)


@twin(
    "memory",
    "fsdp2-fp32-w4-cp_2",
    match=r"^all ranks together keep (\d+) elements of 'exp_avg'; \d+ elements are trained, expected \d+",
    also={"active": r"in 2 copies"},
)
class CopiesForEachPartOfASequence(Torch):
    """Parameters are sharded over the ranks that are fed other rows alone: each part of a sequence has a copy."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        copies = Cell.of(cell.strategy, cell.precision, cell.world_size, dp_replicate=cell.cp)
        return super().wrap(model, precision, copies, device)
