"""Expert parallelism: each rank holds some of the experts, and rows travel to the ranks of theirs, as in torchtitan."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from pytest_distcompat.cell import Cell

#: Options that were tried beside expert parallelism.
BESIDE = frozenset(
    {"model", "ep", "state_dict", "param_groups", "grad_accum", "reshard_after_forward", "set", "compile"}
)


def unsupported_reason(cell: Cell, experts: str) -> str | None:
    """Return why the experts of a model cannot be spread as the cell asks; None if they can."""
    if cell.strategy != "fsdp2":
        return "expert parallelism is driven under FSDP2 alone"
    if not experts:
        return f"the model {cell.option('model')} has no experts in one tensor"
    if cell.precision not in {"fp32", "bf16_mixed"}:
        return f"expert parallelism is not driven in {cell.precision} yet"
    others = [name for name, _ in cell.options if name not in BESIDE]
    return f"expert parallelism is not driven with option {others[0]!r} yet" if others else None


def spread(experts: Module, mesh: DeviceMesh) -> None:
    """Cut the experts' parameters along a mesh of one dimension in place; rows are sent to the ranks of their experts."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
    from torch.nn import Parameter

    def cut(_: str, module: Module, mesh: DeviceMesh) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    exchange: Any = Exchange(mesh)
    distribute_module(experts, mesh, cut, exchange.send, exchange.back)


class Exchange:
    """Exchange of rows between the ranks of expert parallelism, for one forward at a time."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.here: list[int] = []
        self.there: list[int] = []
        self.order: Any = None

    def send(self, _: Module, inputs: Any, __: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of all ranks for this rank's experts, ordered by expert, and how many each gets."""
        import torch
        from torch import distributed

        rows, counts = inputs
        size = self.mesh.size()
        # By sending rank and own expert.
        received = torch.empty_like(counts)
        distributed.all_to_all_single(received, counts, group=self.mesh.get_group())
        self.here, self.there = (one.view(size, -1).sum(1).tolist() for one in (counts, received))
        own = torch.arange(len(counts) // size, device=counts.device).repeat(size)
        self.order = own.repeat_interleave(received).argsort(stable=True)
        return self._exchanged(rows, self.here, self.there)[self.order], received.view(size, -1).sum(0)

    def back(self, _: Module, rows: Any, __: DeviceMesh) -> torch.Tensor:
        """Return what the experts of all ranks computed for this rank's rows, in their order."""
        return self._exchanged(rows[self.order.argsort()], self.there, self.here)

    def _exchanged(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        from torch.distributed.nn.functional import all_to_all_single

        exchange: Any = all_to_all_single
        found = rows.new_empty(sum(received), math.prod(rows.shape[1:]))
        whole: torch.Tensor = exchange(found, rows.contiguous(), received, sent, group=self.mesh.get_group())
        return whole
