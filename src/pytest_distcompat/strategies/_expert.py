"""Expert parallelism: each rank holds some of the experts, and rows travel to the ranks of theirs.

Under FSDP2 as in torchtitan, whose ``ExpertTensorParallel`` cuts each expert too; under ZeRO by DeepSpeed's own layer:
https://www.deepspeed.ai/tutorials/mixture-of-experts/.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models import TinyModel

#: Options that were tried beside DeepSpeed's own expert parallelism, and beside that of FSDP2.
BESIDE_DEEPSPEED = frozenset({"model", "ep", "grad_accum", "set"})
BESIDE_TP = BESIDE_DEEPSPEED | {"tp", "state_dict", "save_only_model", "param_groups", "reshard_after_forward"}
BESIDE = BESIDE_TP | {"compile", "activation_checkpointing", "dp_replicate"}


def unsupported_reason(cell: Cell, tiny: TinyModel, experts: str) -> str | None:
    """Return why the ``experts`` of a model cannot be spread, or cut, as the cell asks; None if they can."""
    kind = "expert parallelism" if cell.ep > 1 or tiny.driver else "tensor parallelism of experts"
    if cell.strategy not in {"fsdp2", "zero0", "zero1", "zero2", "zero3"}:
        return "expert parallelism is driven under FSDP2, and under ZeRO by DeepSpeed's own layer, alone"
    if cell.strategy == "zero3":
        return "Native DeepSpeed MoE is not supported with ZeRO Stage 3, says DeepSpeed"
    own = "deepspeed" if cell.strategy != "fsdp2" else ""
    if not experts or tiny.driver != own:
        return f"the model {tiny.name} has no experts {'of a DeepSpeed layer' if own else 'in one tensor'}"
    if cell.precision not in {"fp32", "bf16_upcast"}:
        return f"{kind} is not driven in {cell.precision} yet"
    beside = BESIDE_DEEPSPEED if own else BESIDE_TP if cell.tp > 1 else BESIDE
    others = [name for name, _ in cell.options if name not in beside]
    return f"{kind} is not driven with option {others[0]!r} yet" if others else None


def spread(experts: Module, mesh: DeviceMesh) -> None:
    """Cut the experts' parameters in place: into experts along a mesh's dimension ``ep``, each into columns along ``tp``.

    Rows are sent to the ranks of their experts, and each of those computes its columns.
    """
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
    from torch.nn import Parameter

    dims = mesh.mesh_dim_names or ()

    def cut(_: str, module: Module, mesh: DeviceMesh) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            placements = [Shard(0 if dim == "ep" else 1) for dim in dims]
            setattr(module, name, Parameter(distribute_tensor(parameter, mesh, placements)))

    exchange: Any = Exchange(mesh["ep"] if "ep" in dims else None, mesh["tp"] if "tp" in dims else None)
    distribute_module(experts, mesh, cut, exchange.send, exchange.back)


class Exchange:
    """Exchange of rows between the ranks of expert parallelism, for one forward at a time, and of their columns."""

    def __init__(self, mesh: DeviceMesh | None, columns: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self.columns = columns
        self.width = 0
        self.here: list[int] = []
        self.there: list[int] = []
        self.order: Any = None

    def send(self, _: Module, inputs: Any, __: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of all ranks for this rank's experts, ordered by expert, and how many each gets."""
        import torch
        from torch import distributed

        rows, counts = inputs
        self.width = rows.shape[1]
        if self.mesh is None:
            return self._whole(rows), counts
        size = self.mesh.size()
        # By sending rank and own expert.
        received = torch.empty_like(counts)
        distributed.all_to_all_single(received, counts, group=self.mesh.get_group())
        self.here, self.there = (one.view(size, -1).sum(1).tolist() for one in (counts, received))
        own = torch.arange(len(counts) // size, device=counts.device).repeat(size)
        self.order = own.repeat_interleave(received).argsort(stable=True)
        here = self._exchanged(rows, self.here, self.there)[self.order]
        return self._whole(here), received.view(size, -1).sum(0)

    def back(self, _: Module, rows: Any, __: DeviceMesh) -> torch.Tensor:
        """Return what the experts of all ranks computed for this rank's rows, in their order."""
        rows = self._gathered(rows)
        return rows if self.mesh is None else self._exchanged(rows[self.order.argsort()], self.there, self.here)

    def _whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows that all ranks of tensor parallelism have; what each sends back is a part of the gradient."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if self.columns is None:
            return rows
        whole: Any = DTensor.from_local(rows, self.columns, [Replicate()], run_check=False)
        found: torch.Tensor = whole.to_local(grad_placements=[Partial()])
        return found

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks of tensor parallelism."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if self.columns is None:
            return rows
        # torch takes columns for evenly cut unless it gets the shape.
        shape = rows.new_empty(len(rows), self.width, device="meta")
        whole: Any = {"shape": shape.shape, "stride": shape.stride()}
        parts: Any = DTensor.from_local(rows, self.columns, [Shard(1)], run_check=False, **whole)
        # Copied: FSDP2 warns of a unit that returns a view.
        found: torch.Tensor = parts.redistribute(placements=[Replicate()]).to_local().clone()
        return found

    def _exchanged(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        from torch.distributed.nn.functional import all_to_all_single

        assert self.mesh is not None

        exchange: Any = all_to_all_single
        found = rows.new_empty(sum(received), math.prod(rows.shape[1:]))
        whole: torch.Tensor = exchange(found, rows.contiguous(), received, sent, group=self.mesh.get_group())
        return whole


def spread_by_deepspeed(model: Any, size: int, rank: int) -> None:
    """Give the model a layer with this rank's experts alone in place of the one with all, before the engine is made."""
    whole = model.moe.deepspeed_moe
    experts = whole.experts.deepspeed_experts
    model.moe = model.make_moe(experts[0], ep_size=size)
    model.moe.deepspeed_moe.gate.wg = whole.gate.wg
    own = model.moe.deepspeed_moe.experts.deepspeed_experts
    # Neighbours hold the experts together: deepspeed/utils/groups.py, _create_expert_and_data_parallel.
    first = rank % size * len(own)
    for expert, source in zip(own, experts[first : first + len(own)], strict=True):
        expert.load_state_dict(source.state_dict())
