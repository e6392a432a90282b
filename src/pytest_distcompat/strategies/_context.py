"""Context parallelism: each rank computes on a part of the sequence, with the keys and values of all of it.

torch's own ``context_parallel`` has kernels for GPUs alone: on the CPU it raises ``NotImplementedError`` in the first forward.
Here keys and values are gathered, as for Llama 3 (https://arxiv.org/abs/2407.21783, section 3.3.2), through the interface of
transformers for other attention functions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytest_distcompat.models.llama import LLAMAS

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models._base import Batch

#: Name of the attention among those of transformers.
ATTENTION = "distcompat_context_parallel"
#: Options that were tried beside context parallelism.
BESIDE = frozenset(
    {
        "model",
        "dp_replicate",
        "tp",
        "cp",
        "state_dict",
        "activation_checkpointing",
        "grad_accum",
        "compile",
        "param_groups",
        "set",
    }
)

#: Options that were tried beside DeepSpeed's Ulysses.
BESIDE_ULYSSES = frozenset({"model", "cp", "set"})


def unsupported_reason(cell: Cell) -> str | None:
    """Return why no sequence is cut as the cell asks; None if one is."""
    if cell.strategy not in {"fsdp2", "zero0", "zero1", "zero2", "zero3"}:
        return "context parallelism is driven under FSDP2, and under ZeRO as DeepSpeed's Ulysses, alone"
    if cell.option("model") not in LLAMAS:
        return f"the model {cell.option('model')} has no sequence to cut"
    # Ulysses reduces gradients in float32, whatever they are in.
    if cell.precision not in ({"fp32", "bf16_upcast"} if cell.strategy == "fsdp2" else {"fp32"}):
        return f"context parallelism is not driven in {cell.precision} yet"
    beside = BESIDE if cell.strategy == "fsdp2" else BESIDE_ULYSSES
    others = [name for name, _ in cell.options if name not in beside]
    return f"context parallelism is not driven with option {others[0]!r} yet" if others else None


@contextlib.contextmanager
def attending(model: Any, mesh: DeviceMesh | None) -> Iterator[None]:
    """Run the model's attention over the parts of the sequence along a mesh; without a mesh leave it as it is."""
    if mesh is None:
        yield
        return
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, functools.partial(attend, mesh))
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def attend(
    mesh: DeviceMesh,
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: Any,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention of this rank's (batch, heads, part of the sequence, size) to the whole sequence."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    keys, values = (_whole(one, mesh) for one in (key, value))
    first, device = mesh.get_local_rank() * query.shape[2], query.device
    own = torch.arange(first, first + query.shape[2], device=device)
    causal = own[:, None] >= torch.arange(keys.shape[2], device=device)
    found = scaled_dot_product_attention(query, keys, values, attn_mask=causal, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2).contiguous(), None


def _whole(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a tensor gathered along the sequence; each rank's gradient of the whole is one of several to be summed."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    gathered: Any = DTensor.from_local(part, mesh, [Shard(2)]).redistribute(placements=[Replicate()])
    whole: torch.Tensor = gathered.to_local(grad_placements=[Partial()])
    return whole


def loss_of(model: Any, mesh: DeviceMesh, batch: Batch) -> torch.Tensor:
    """Return this rank's share of the loss of whole rows, times the ranks of the mesh: the mean over them is the loss."""
    import torch
    from torch.nn.functional import pad

    # The next token of a part's last one is in the next part.
    labels = pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    positions = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    whole = {"input_ids": batch["input_ids"], "position_ids": positions, "labels": labels}
    part = {name: one.chunk(mesh.size(), dim=1)[mesh.get_local_rank()].contiguous() for name, one in whole.items()}
    count = (labels != -100).sum()
    loss: torch.Tensor = model(**part, shift_labels=part["labels"], num_items_in_batch=count).loss
    return loss * mesh.size()


def positions_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return the position of each token in its row, which Ulysses needs."""
    import torch

    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()


def ulysses_loss(engine: Any, batch: Batch) -> torch.Tensor:
    """Return the loss of whole rows, of which DeepSpeed's Ulysses gives each rank of a sequence a part."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as peers
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    group, device = peers.get_sequence_parallel_group(), batch["input_ids"].device
    place = peers.get_sequence_parallel_rank(), group, peers.get_sequence_parallel_world_size(), device
    # The adapter takes a batch of each rank in turn, and all have the same.
    whole = {**batch, "position_ids": positions_of(batch["input_ids"])}
    loader: Any = UlyssesSPDataLoaderAdapter([whole], *place)
    return ulysses_part_loss(engine, {name: one.to(device) for name, one in next(loader).items()})


def ulysses_part_loss(engine: Any, batch: Batch) -> torch.Tensor:
    """Return the loss of whole rows, of which this rank has the part that Ulysses gives it."""
    # https://www.deepspeed.ai/tutorials/ulysses-alst-sequence-parallelism/, with the sum that it advises where the backward
    # pass of ``all_gather`` cannot be used: on gloo that takes the group's ranks for those of all.
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as peers
    from torch import distributed
    from torch.distributed.nn.functional import all_reduce
    from torch.nn.functional import cross_entropy

    group = peers.get_sequence_parallel_group()
    part = {name: one.contiguous() for name, one in batch.items()}
    labels = part.pop("shift_labels")
    count = (labels != -100).sum()
    distributed.all_reduce(count, group=group)
    own = cross_entropy(engine(**part).logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    loss: torch.Tensor = all_reduce(own / count, group=group)  # type: ignore[no-untyped-call]
    return loss
