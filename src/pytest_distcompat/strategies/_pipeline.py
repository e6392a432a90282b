"""Pipeline parallelism by ``torch.distributed.pipelining``: each rank keeps the layers of its stages, as in torchtitan.

https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models._base import Batch, Stages

#: Options that were tried beside pipeline parallelism.
BESIDE = frozenset(
    (
        "model",
        "pp",
        "pp_schedule",
        "dp_replicate",
        "tp",
        "compile",
        "grad_accum",
        "activation_checkpointing",
        "param_groups",
        "set",
    )
)


def unsupported_reason(cell: Cell, stages: Stages | None) -> str | None:
    """Return why a model cannot be cut into stages as the cell asks; None if it can."""
    if cell.strategy not in {"ddp", "fsdp2"}:
        return "pipeline parallelism is driven under DDP and FSDP2 alone"
    if stages is None:
        return f"the model {cell.option('model')} has no stages to be cut into"
    if cell.precision not in {"fp32", "bf16_upcast"}:
        return f"pipeline parallelism is not driven in {cell.precision} yet"
    schedule = cell.option("pp_schedule")
    if cell.pp > 2 and schedule == "1F1B":
        return "1F1B needs as many micro-batches as stages, and a batch has two rows"
    if cell.stages > cell.pp and cell.strategy != "fsdp2":
        return f"{schedule} has several stages on a rank, each of which DDP would wrap alone"
    if cell.stages > len(stages.parts):
        return (
            f"{schedule} needs {cell.stages} stages, and the model {cell.option('model')} has {len(stages.parts)} parts"
        )
    if cell.option("sp"):
        return (
            "the model takes positions and masks from what a stage receives, of which sequence parallelism sends a part"
        )
    others = [name for name, _ in cell.options if name not in BESIDE]
    return f"pipeline parallelism is not driven with option {others[0]!r} yet" if others else None


class Pipeline:
    """This rank's stages, and what runs micro-batches through them."""

    def __init__(self, stages: Stages, cell: Cell, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.stages, self.cell, self.device = stages, cell, device
        sizes = cell.pp, cell.world_size // cell.pp
        self.group: Any = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "each"))["pp"].get_group()
        self.index: int = self.group.rank()
        self.first, self.last = self.index == 0, self.index == cell.pp - 1
        self.modules: dict[int, Any] = {}
        self.shapes: dict[str, Any] = {}
        self.schedules: dict[int, Any] = {}

    def keep(self, model: Any) -> dict[int, Module]:
        """Keep this rank's layers in the model, in place, and return the module of each of its stages, which share them."""
        from pytest_distcompat.models._modules import Elsewhere

        size, found = len(self.stages.parts) // self.cell.stages, {}
        stage_of = {name: place // size for place, part in enumerate(self.stages.parts) for name in part}
        parts = {name: model.get_submodule(name) for name in stage_of}
        for name in parts:
            if stage_of[name] % self.cell.pp != self.index:
                model.set_submodule(name, Elsewhere())
        for number in range(self.index, self.cell.stages, self.cell.pp):
            kept = {id(part): part if stage_of[name] == number else Elsewhere() for name, part in parts.items()}
            stage: Any = copy.deepcopy(model, kept) if self.cell.stages > self.cell.pp else model
            ends = {"first": number == 0, "last": number == self.cell.stages - 1}
            stage.forward = functools.partial(self.stages.forward, stage, **ends)
            found[number] = stage
        return found

    def connect(self, modules: Mapping[int, Module], example: Batch | None) -> None:
        """Take the modules of the stages, as the strategy has wrapped them.

        With an ``example`` of one row that stage knows what it receives and sends, which else torch finds out.
        """
        self.modules = {**modules}
        if example is not None:
            (module,) = modules.values()
            tokens, hidden, logits = self.stages.shapes(module, example)
            self.shapes = {
                "input_args": tokens if self.first else hidden,
                "output_args": logits if self.last else hidden,
            }

    def step(self, rows: Batch, divisor: int) -> float:
        """Run forward and backward of each row, and return the sum of their losses, which the last stage tells the others.

        Args:
            rows: Micro-batches of one row each.
            divisor: What the loss of each is divided by.
        """
        import torch

        inputs = (rows["input_ids"],) if self.first else ()
        losses: list[torch.Tensor] = []
        target: dict[str, Any] = {"target": rows["labels"], "losses": losses} if self.last else {}
        self.schedule(len(rows["labels"]), divisor).step(*inputs, **target, return_outputs=False)
        total = torch.stack(losses).sum().detach().float() if losses else torch.zeros((), device=self.device)
        torch.distributed.broadcast(total, group=self.group, group_src=self.cell.pp - 1)
        return float(total)

    def schedule(self, count: int, divisor: int) -> Any:
        """Return the schedule of so many micro-batches."""
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        if count not in self.schedules:
            make: Any = get_schedule_class(str(self.cell.option("pp_schedule")))
            # Each schedule has its own: a stage keeps the number of micro-batches of the last one that was made ready in it.
            stages = [
                PipelineStage(module, number, self.cell.stages, self.device, group=self.group, **self.shapes)
                for number, module in self.modules.items()
            ]
            self.schedules[count] = make(
                stages if self.cell.stages > self.cell.pp else stages[0],
                n_microbatches=count,
                loss_fn=lambda logits, labels: self.stages.loss(logits, labels) / divisor,
                # It would divide once more in each call: https://github.com/pytorch/torchtitan/issues/1733
                scale_grads=False,
            )
        return self.schedules[count]

    def outputs(self, received: Any) -> Any:
        """Return what the last stage computes, on all stages."""
        from torch import distributed

        for number in range(self.cell.stages):
            # The copy waits for a sum over parts of layers; pickle takes what is there.
            sent = [self.modules[number](received).clone() if number in self.modules else None]
            distributed.broadcast_object_list(sent, group=self.group, group_src=number % self.cell.pp)
            received = sent[0]
        return received

    def gathered(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of all stages together, on the rank of the first one; elsewhere this rank's."""
        from torch import distributed

        states: Any = [None] * self.cell.pp if self.first else None
        distributed.gather_object(dict(state), states, group=self.group, group_dst=0)
        return {name: value for one in states or [state] for name, value in one.items()}
