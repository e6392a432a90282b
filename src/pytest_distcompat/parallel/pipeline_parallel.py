"""Pipeline parallelism (``pp``): each rank keeps the layers of its stages, as in torchtitan.

The driver for plain torch, by which it is tested, has it in cells (configurations under test) such
as ``fsdp2-fp32-w4-pp_2``. At collection ``unsupported_reason`` says which cells cannot run. On each
rank ``build`` makes a ``Pipeline``, calls ``keep`` to cut the model, wraps each stage by FSDP2 or
DDP, and calls ``connect``. Then ``step`` trains on the rows of a batch, ``outputs`` evaluates, and
the function ``gathered`` collects the weights for an export.

It is that of ``torch.distributed.pipelining``. A stage is a run of the model's layers. It receives
hidden states from the stage before it and sends its own to the next one; the first receives tokens,
the last computes logits and loss. With one stage a rank, rank r holds stage r. Interleaved
schedules have two a rank: rank r holds stages r and r + pp. A batch passes the stages row by row,
in micro-batches.

https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.parallel.reasons import first_reason, untried_option_reason

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models import Batch, Stages

#: Names of the options that were tried beside pipeline parallelism. A cell with another option
#: cannot run.
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
    """Return why a model cannot be cut into stages as the cell asks; None if it can.

    Args:
        cell: The cell, with ``pp`` above 1.
        stages: How its model is cut; None if it cannot be.
    """
    if cell.strategy not in {"ddp", "fsdp2"}:
        return "pipeline parallelism is driven under DDP and FSDP2 alone"
    if stages is None:
        return f"the model {cell.option('model')} has no stages to be cut into"
    schedule = cell.option("pp_schedule")
    reason = first_reason(
        (
            cell.precision not in {"fp32", "bf16_upcast"},
            f"pipeline parallelism is not driven in {cell.precision} yet",
        ),
        (
            cell.pp > 2 and schedule == "1F1B",
            "1F1B needs as many micro-batches as stages, and a batch has two rows",
        ),
        (
            cell.stages > cell.pp and cell.strategy != "fsdp2",
            f"{schedule} has several stages on a rank, each of which DDP would wrap alone",
        ),
        (
            cell.stages > len(stages.parts),
            (
                f"{schedule} needs {cell.stages} stages, "
                f"and the model {cell.option('model')} has {len(stages.parts)} parts"
            ),
        ),
        (
            bool(cell.option("sp")),
            (
                "the model takes positions and masks from what a stage receives, "
                "of which sequence parallelism sends a part"
            ),
        ),
    )
    if reason is not None:
        return reason
    # An option of the cell that is not in ``BESIDE`` is a reason too.
    return untried_option_reason("pipeline parallelism", cell, BESIDE)


class Pipeline:
    """This rank's stages, and the schedules that run micro-batches through them.

    Attributes:
        stages: How the model is cut into stages: ``parts`` has names of layers in the order of the
            forward, those of one part stay together; ``forward``, ``loss`` and ``shapes`` are
            functions for a stage of it.
        group: The process group of the ranks with the stages of one copy of the model.
        index: This rank's number in the group, and the number of its first stage.
        first: Whether this rank has the first stage.
        last: Whether this rank has the last stage.
        modules: Number of a stage of this rank -> its module.
        shapes: Example tensors that the stage receives (``input_args``) and sends
            (``output_args``); empty if torch is to find out their shapes.
        schedules: Number of micro-batches -> the schedule for it.
    """

    def __init__(self, stages: Stages, cell: Cell, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.stages = stages
        self.cell = cell
        self.device = device
        # The ranks of dimension "each" hold the same stages. They are neighbours: with 4 ranks and
        # 2 stages, ranks 0 and 1 hold the first stage, 2 and 3 the second.
        sizes = (cell.pp, cell.world_size // cell.pp)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "each"))
        self.group: Any = mesh["pp"].get_group()
        self.index: int = self.group.rank()
        self.first = self.index == 0
        self.last = self.index == cell.pp - 1
        self.modules: dict[int, Any] = {}
        self.shapes: dict[str, Any] = {}
        self.schedules: dict[int, Any] = {}

    def keep(self, model: Any) -> dict[int, Module]:
        """Remove the layers of other ranks from the model, and return each stage's module.

        The model is changed in place; the stages are those of this rank. With several stages on a
        rank each module is a copy of the model that shares the layers of its stage.
        """
        from pytest_distcompat.parallel.placeholder import Elsewhere

        stage_by_name = self._stage_by_name()
        # All layers, before placeholders take their place.
        layers = {name: model.get_submodule(name) for name in stage_by_name}
        for name, stage in stage_by_name.items():
            if stage % self.cell.pp != self.index:
                model.set_submodule(name, Elsewhere())
        modules: dict[int, Module] = {}
        # The stages of this rank: ``index``, and ``index + pp`` if there are two.
        for number in range(self.index, self.cell.stages, self.cell.pp):
            module = model
            if self.cell.stages > self.cell.pp:
                # What the memo of a deep copy has for an object stands in the object's place:
                # layers of the stage are shared.
                memo: dict[int, Module] = {}
                for name, layer in layers.items():
                    if stage_by_name[name] == number:
                        memo[id(layer)] = layer
                    else:
                        memo[id(layer)] = Elsewhere()
                module = copy.deepcopy(model, memo)
            # What the stage sends on is less than what the model's own forward computes.
            module.forward = functools.partial(
                self.stages.forward,
                module,
                first=number == 0,
                last=number == self.cell.stages - 1,
            )
            modules[number] = module
        return modules

    def _stage_by_name(self) -> dict[str, int]:
        """Return the number of the stage that each layer is in, by the layer's name."""
        parts_of_stage = len(self.stages.parts) // self.cell.stages
        stage_by_name = {}
        for index, part in enumerate(self.stages.parts):
            for name in part:
                stage_by_name[name] = index // parts_of_stage
        return stage_by_name

    def connect(self, modules: Mapping[int, Module], example: Batch | None) -> None:
        """Take the modules of the stages, as the strategy has wrapped them.

        Args:
            modules: Number of a stage of this rank -> its module.
            example: A batch of one row, for the shapes that the only stage of this rank receives
                and sends; None if torch is to find them out.
        """
        self.modules = dict(modules)
        if example is None:
            return
        (module,) = modules.values()
        tokens, hidden, logits = self.stages.shapes(module, example)
        self.shapes = {"input_args": hidden, "output_args": hidden}
        if self.first:
            self.shapes["input_args"] = tokens
        if self.last:
            self.shapes["output_args"] = logits

    def step(self, rows: Batch, divisor: int) -> float:
        """Run forward and backward of each row, and return the sum of their losses.

        Only the last stage computes losses. It broadcasts the sum, so that all ranks return it.

        Args:
            rows: Micro-batches of one row each.
            divisor: What the loss of each is divided by.
        """
        import torch

        labels = rows["labels"]
        inputs: list[torch.Tensor] = []
        if self.first:
            inputs.append(rows["input_ids"])
        losses: list[torch.Tensor] = []
        target: dict[str, Any] = {}
        if self.last:
            target = {"target": labels, "losses": losses}
        schedule = self.schedule(len(labels), divisor)
        schedule.step(*inputs, **target, return_outputs=False)
        # On the other stages the list stays empty.
        total = torch.zeros((), device=self.device)
        if losses:
            total = torch.stack(losses).sum().detach().float()
        last_stage = self.cell.pp - 1
        torch.distributed.broadcast(total, group=self.group, group_src=last_stage)
        return float(total)

    def schedule(self, count: int, divisor: int) -> Any:
        """Return the schedule of ``count`` micro-batches, the same object for the same number.

        The loss of each micro-batch is divided by the ``divisor``.
        """
        if count not in self.schedules:
            self.schedules[count] = self._make_schedule(count, divisor)
        return self.schedules[count]

    def _make_schedule(self, count: int, divisor: int) -> Any:
        """Return a new schedule of ``count`` micro-batches around this rank's stages."""
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        # Each schedule has stages of its own: a stage keeps the number of micro-batches of the last
        # schedule that it was in.
        stages: list[Any] = []
        for number, module in self.modules.items():
            stage = PipelineStage(
                module,
                number,
                self.cell.stages,
                self.device,
                group=self.group,
                **self.shapes,
            )
            stages.append(stage)
        name = str(self.cell.option("pp_schedule"))
        schedule_class: Any = get_schedule_class(name)
        several_per_rank = self.cell.stages > self.cell.pp

        def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.stages.loss(logits, labels) / divisor

        return schedule_class(
            stages if several_per_rank else stages[0],
            n_microbatches=count,
            loss_fn=loss_of,
            # The loss is divided already. With True the gradients would be divided once more in
            # each call: https://github.com/pytorch/torchtitan/issues/1733
            scale_grads=False,
        )

    def outputs(self, received: Any) -> Any:
        """Return the logits of the last stage, on all stages, for the tokens of a batch.

        Stage by stage, without a schedule: each rank that holds a stage broadcasts what it
        computed.
        """
        from torch import distributed

        for number in range(self.cell.stages):
            sent = None
            if number in self.modules:
                # Under tensor parallelism the output may be an asynchronous sum: the copy waits for
                # it, while pickle would take what is there.
                sent = self.modules[number](received).clone()
            message = [sent]
            sender = number % self.cell.pp
            distributed.broadcast_object_list(message, group=self.group, group_src=sender)
            received = message[0]
        return received


def gathered(state: Mapping[str, Any], group: Any) -> dict[str, Any]:
    """Return the state of all stages of a pipeline together, on the rank of the first one.

    On the other ranks it is their own state.

    Args:
        state: Parameter names -> whole tensors of this rank's stages.
        group: The process group of the ranks with the stages of one copy of the model.
    """
    from torch import distributed

    own = dict(state)
    if group.rank() > 0:
        distributed.gather_object(own, group=group, group_dst=0)
        return own
    states: Any = [None] * group.size()
    distributed.gather_object(own, states, group=group, group_dst=0)
    merged: dict[str, Any] = {}
    for state_of_rank in states:
        merged |= state_of_rank
    return merged
