"""Expert parallelism (``ep``): each rank holds some of the experts.

A rank sends each of its rows to the rank that holds the expert of that row, and gets the output
back. Of 4 experts and ``ep`` 2, rank 0 holds the experts 0 and 1, rank 1 the experts 2 and 3. The
two have different rows, so that they are data-parallel ranks for the layers around the experts.

The built-in drivers (classes by which trainers are tested) for torch and DeepSpeed have it in cells
(configurations under test) such as ``fsdp2-fp32-w2-model_moe_fused-ep_2``. At collection
``unsupported_reason`` says which cells cannot run. On each rank the strategy ``fsdp2`` calls
``spread`` for the module of experts, and the driver for DeepSpeed calls ``spread_by_deepspeed``.
The model's *router* chooses the expert of a row.

Under FSDP2 this module does the exchange, as torchtitan does, whose ``ExpertTensorParallel`` also
shards each expert. Under ZeRO DeepSpeed's own layer does it:
https://www.deepspeed.ai/tutorials/mixture-of-experts/.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pytest_distcompat.parallel.reasons import first_reason, untried_option_reason

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models import TinyModel

#: Names of the options that a cell may have beside DeepSpeed's own expert parallelism: the
#: combinations that were tried. A cell with another option is skipped.
BESIDE_DEEPSPEED = frozenset({"model", "ep", "grad_accum", "set"})
#: The same under FSDP2 with tensor parallelism.
BESIDE_TP = BESIDE_DEEPSPEED | {
    "tp",
    "state_dict",
    "save_only_model",
    "param_groups",
    "reshard_after_forward",
}
#: The same under FSDP2 without tensor parallelism.
BESIDE = BESIDE_TP | {"compile", "activation_checkpointing", "dp_replicate"}


def unsupported_reason(cell: Cell, tiny: TinyModel, experts: str) -> str | None:
    """Return why the ``experts`` of a model cannot be spread or sharded as the cell asks.

    None if they can: spread over ranks, or sharded by tensor parallelism.

    Args:
        cell: The cell, with ``ep`` above 1, with ``tp`` above 1, or with a model for DeepSpeed
            alone.
        tiny: Its model.
        experts: The name of the model's module of experts; empty without one.
    """
    by_deepspeed = cell.strategy != "fsdp2"
    # ``tiny.driver`` names the only driver that can train a model: ``deepspeed`` for a model with
    # DeepSpeed's own layer of experts. It is empty for a model that all drivers can train.
    if by_deepspeed:
        needed_driver = "deepspeed"
        layer = "of a DeepSpeed layer"
    else:
        needed_driver = ""
        layer = "in one tensor"
    feature = "tensor parallelism of experts"
    if cell.ep > 1 or tiny.driver:
        feature = "expert parallelism"
    reason = first_reason(
        (
            cell.strategy not in {"fsdp2", "zero0", "zero1", "zero2", "zero3"},
            (
                "expert parallelism is driven under FSDP2, "
                "and under ZeRO by DeepSpeed's own layer, alone"
            ),
        ),
        (
            cell.strategy == "zero3",
            "Native DeepSpeed MoE is not supported with ZeRO Stage 3, says DeepSpeed",
        ),
        (
            not experts or tiny.driver != needed_driver,
            f"the model {tiny.name} has no experts {layer}",
        ),
        (
            cell.precision not in {"fp32", "bf16_upcast"},
            f"{feature} is not driven in {cell.precision} yet",
        ),
    )
    if reason is not None:
        return reason
    if by_deepspeed:
        tried = BESIDE_DEEPSPEED
    elif cell.tp > 1:
        tried = BESIDE_TP
    else:
        tried = BESIDE
    return untried_option_reason(feature, cell, tried)


def spread(experts: Module, mesh: DeviceMesh) -> None:
    """Shard the experts' parameters in place, by expert along ``ep`` and by column along ``tp``.

    Rows are sent to the ranks of their experts, and each of those computes its columns.

    Args:
        experts: Module whose parameters are (experts, outputs, ...), and whose forward takes rows
            in the order of their experts and how many each has.
        mesh: Dimensions ``ep``, ``tp`` or both.
    """
    from torch.distributed.tensor import Placement, Shard, distribute_module, distribute_tensor
    from torch.nn import Parameter

    dimensions = mesh.mesh_dim_names or ()
    placements: list[Placement] = []
    for dimension in dimensions:
        # Dimension 0 of a parameter is the expert, dimension 1 the output.
        tensor_dim = 0 if dimension == "ep" else 1
        placements.append(Shard(tensor_dim))

    def shard(_: str, module: Module, mesh: DeviceMesh) -> None:
        # ``distribute_module`` calls it for the module of experts and each module inside.
        for name, parameter in module.named_parameters(recurse=False):
            sharded = distribute_tensor(parameter, mesh, placements)
            setattr(module, name, Parameter(sharded))

    expert_mesh = None
    if "ep" in dimensions:
        expert_mesh = mesh["ep"]
    column_mesh = None
    if "tp" in dimensions:
        column_mesh = mesh["tp"]
    exchange: Any = Exchange(expert_mesh, column_mesh)
    # ``send`` is called with the inputs of each forward, ``back`` with its outputs.
    distribute_module(experts, mesh, shard, exchange.send, exchange.back)


class Exchange:
    """Exchange of rows between the ranks of expert parallelism, and of their columns.

    It is for one forward at a time: ``send`` before it keeps what ``back`` needs after it. Of four
    experts on two ranks, a rank whose rows are [3, 1, 0, 2] for each of the experts sends 4 rows to
    rank 0 and 2 to rank 1.

    Attributes:
        mesh: The ranks of ``ep``; None without expert parallelism.
        columns: The ranks of ``tp``, which compute the columns of an expert; None without tensor
            parallelism.
        width: Columns of a row.
        sent: How many rows this rank sends to each rank: [4, 2].
        received: How many rows this rank receives from each rank.
        order: Indices that sort the received rows by expert.
    """

    def __init__(self, mesh: DeviceMesh | None, columns: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.columns = columns
        self.width = 0
        self.sent: list[int] = []
        self.received: list[int] = []
        self.order: Any = None

    def send(self, _: Module, inputs: Any, __: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of all ranks for this rank's experts, and how many each gets.

        The rows are ordered by expert.

        Args:
            inputs: This rank's rows (rows, width), ordered by expert, and a tensor of how many each
                of all experts has.
        """
        import torch
        from torch import distributed

        rows, counts = inputs
        self.width = rows.shape[1]
        if self.mesh is None:
            return self._whole(rows), counts
        ranks = self.mesh.size()
        own_experts = len(counts) // ranks
        # For each rank, how many of its rows are for each of this rank's experts.
        received_counts = torch.empty_like(counts)
        distributed.all_to_all_single(received_counts, counts, group=self.mesh.get_group())
        # Both of shape (ranks, experts of a rank).
        sent_by_rank = counts.view(ranks, -1)
        received_by_rank = received_counts.view(ranks, -1)
        self.sent = sent_by_rank.sum(1).tolist()
        self.received = received_by_rank.sum(1).tolist()
        # Rows arrive ordered by sending rank, and of each rank by expert.
        experts = torch.arange(own_experts, device=counts.device).repeat(ranks)
        expert_of_row = experts.repeat_interleave(received_counts)
        self.order = expert_of_row.argsort(stable=True)
        received_rows = self._exchanged(rows, self.sent, self.received)
        rows_by_expert = self._whole(received_rows[self.order])
        return rows_by_expert, received_by_rank.sum(0)

    def back(self, _: Module, rows: Any, __: DeviceMesh) -> torch.Tensor:
        """Return what the experts of all ranks computed for this rank's rows, in their order.

        It is the way of ``send`` back: in the order of arrival, then to the ranks they came from.
        """
        outputs = self._gathered(rows)
        if self.mesh is None:
            return outputs
        # ``argsort`` of a permutation is its inverse.
        as_received = outputs[self.order.argsort()]
        return self._exchanged(as_received, self.received, self.sent)

    def _whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the same rows; the backward pass sums their gradients over the ranks of ``tp``.

        All these ranks have the same rows, and each computes only its columns of the experts.
        """
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if self.columns is None:
            return rows
        replicated: Any = DTensor.from_local(rows, self.columns, [Replicate()], run_check=False)
        local: torch.Tensor = replicated.to_local(grad_placements=[Partial()])
        return local

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Return full rows, put together from the columns that each rank of ``tp`` has computed."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if self.columns is None:
            return rows
        # torch takes columns for evenly sharded unless it gets the shape. The tensor on the meta
        # device has a shape and strides, and no memory.
        full = rows.new_empty(len(rows), self.width, device="meta")
        sharded: Any = DTensor.from_local(
            rows,
            self.columns,
            [Shard(1)],
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        replicated = sharded.redistribute(placements=[Replicate()])
        gathered: torch.Tensor = replicated.to_local()
        # Copied: FSDP2 warns of a unit that returns a view.
        return gathered.clone()

    def _exchanged(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Return the rows that all ranks of ``ep`` send to this one, ordered by sending rank.

        Args:
            rows: This rank's rows, ordered by receiving rank.
            sent: How many of them go to each rank.
            received: How many rows come from each rank.
        """
        from torch.distributed.nn.functional import all_to_all_single

        assert self.mesh is not None

        all_to_all: Any = all_to_all_single
        # The columns of a row; of rows with several dimensions, of all of these together.
        width = math.prod(rows.shape[1:])
        output = rows.new_empty(sum(received), width)
        exchanged: torch.Tensor = all_to_all(
            output, rows.contiguous(), received, sent, group=self.mesh.get_group()
        )
        return exchanged


def spread_by_deepspeed(model: Any, size: int, rank: int) -> None:
    """Replace the model's layer with all experts by one with this rank's alone.

    Called before the engine is made.

    Args:
        model: A ``models.modules.DeepSpeedMixture``, with all experts on each rank.
        size: The ranks that hold the experts together: ``ep``.
        rank: This rank.
    """
    full_layer = model.moe.deepspeed_moe
    all_experts = full_layer.experts.deepspeed_experts
    # DeepSpeed copies the given expert for each that this rank holds; below they get their values.
    model.moe = model.make_moe(all_experts[0], ep_size=size)
    model.moe.deepspeed_moe.gate.wg = full_layer.gate.wg
    own_experts = model.moe.deepspeed_moe.experts.deepspeed_experts
    # Neighbours hold the experts together: deepspeed/utils/groups.py,
    # _create_expert_and_data_parallel.
    first = rank % size * len(own_experts)
    originals = all_experts[first : first + len(own_experts)]
    for expert, original in zip(own_experts, originals, strict=True):
        expert.load_state_dict(original.state_dict())
