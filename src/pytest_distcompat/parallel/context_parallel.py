"""Context parallelism (``cp``): each rank computes on its part of the sequence.

In attention its queries meet the keys and values of the whole sequence. Of n tokens over cp ranks,
rank r of them has those from r * n / cp to (r + 1) * n / cp, of every row.

Drivers, by which trainers are tested, have it in cells (configurations under test) such as
``fsdp2-fp32-w2-cp_2``; the model is a Llama of transformers. There are two kinds:

- Under FSDP2, for the driver for plain torch: on each rank ``step`` runs the forward within
  ``attending`` and takes the loss of ``loss_of``.
- Under ZeRO it is DeepSpeed's Ulysses: ranks exchange heads for tokens inside of attention.
  ``ulysses_loss`` is for DeepSpeed's own driver, ``ulysses_part_loss`` for that of accelerate,
  whose loader gives each rank its part.

torch's own ``context_parallel`` has kernels for GPUs alone: on the CPU it raises
``NotImplementedError`` in the first forward. Here keys and values are gathered, as for Llama 3
(https://arxiv.org/abs/2407.21783, section 3.3.2), through the interface of transformers for other
attention functions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytest_distcompat.models import LLAMAS
from pytest_distcompat.parallel.reasons import first_reason, untried_option_reason

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models import Batch

#: The name under which the attention is registered with transformers.
ATTENTION = "distcompat_context_parallel"
#: Names of the options that were tried beside context parallelism under FSDP2.
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

#: The same beside DeepSpeed's Ulysses.
BESIDE_ULYSSES = frozenset({"model", "cp", "set"})


def unsupported_reason(cell: Cell) -> str | None:
    """Return why no sequence is sharded as the cell, with ``cp`` above 1, asks; None if one is."""
    if cell.strategy == "fsdp2":
        precisions = {"fp32", "bf16_upcast"}
        tried = BESIDE
    else:
        # Ulysses reduces gradients in float32, whatever they are in.
        precisions = {"fp32"}
        tried = BESIDE_ULYSSES
    reason = first_reason(
        (
            cell.strategy not in {"fsdp2", "zero0", "zero1", "zero2", "zero3"},
            (
                "context parallelism is driven under FSDP2, "
                "and under ZeRO as DeepSpeed's Ulysses, alone"
            ),
        ),
        (
            # Some of the others have a sequence too, as ``llama_calibrated``: they are not tried.
            cell.option("model") not in LLAMAS,
            f"context parallelism is driven with the models {', '.join(LLAMAS)} alone",
        ),
        (
            cell.precision not in precisions,
            f"context parallelism is not driven in {cell.precision} yet",
        ),
    )
    if reason is not None:
        return reason
    return untried_option_reason("context parallelism", cell, tried)


@contextlib.contextmanager
def attending(model: Any, mesh: DeviceMesh | None) -> Iterator[None]:
    """Replace the model's attention, within the context, by one over a sharded sequence.

    Args:
        model: A model of transformers.
        mesh: One dimension, the ranks that have the parts of each sequence; None without context
            parallelism, where the attention stays as it is.
    """
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
    """Return causal attention of this rank's part of the sequence to the full one.

    The signature is that of transformers' attention interface.

    Args:
        mesh: One dimension, the ranks that have the parts of each sequence.
        query: (batch, heads, tokens of the part, head size), as are ``key`` and ``value``, with
            fewer heads.
        key: Keys of the part.
        value: Values of the part.
        scaling: Factor on the products of queries and keys.

    Returns:
        (batch, tokens of the part, heads, head size), and no attention weights.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    keys = _gather_sequence(key, mesh)
    values = _gather_sequence(value, mesh)
    part_length = query.shape[2]
    first = mesh.get_local_rank() * part_length
    query_positions = torch.arange(first, first + part_length, device=query.device)
    key_positions = torch.arange(keys.shape[2], device=query.device)
    causal = query_positions[:, None] >= key_positions
    output = scaled_dot_product_attention(
        query, keys, values, attn_mask=causal, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


def _gather_sequence(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return (batch, heads, all tokens, head size) from this rank's part of the tokens.

    In the backward pass the gradients of all ranks are summed.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    sharded: Any = DTensor.from_local(part, mesh, [Shard(2)])
    gathered: Any = sharded.redistribute(placements=[Replicate()])
    full: torch.Tensor = gathered.to_local(grad_placements=[Partial()])
    return full


def loss_of(model: Any, mesh: DeviceMesh, batch: Batch) -> torch.Tensor:
    """Return this rank's share of the loss of full rows, times the ranks of the mesh.

    FSDP2 averages gradients over these ranks as over data parallel ones: the mean is the loss.

    Args:
        model: A Llama whose attention is ``attend``.
        mesh: One dimension, the ranks that have the parts of each sequence.
        batch: Full rows, the same on all of these ranks.
    """
    import torch
    from torch.nn.functional import pad

    # Shifted before they are split: the label of a part's last token is the first of the next part.
    padded = pad(batch["labels"], (0, 1), value=-100)
    labels = padded[:, 1:]
    row_positions = torch.arange(labels.shape[1], device=labels.device)
    positions = row_positions.expand_as(labels)
    full = {"input_ids": batch["input_ids"], "position_ids": positions, "labels": labels}
    part = {}
    for name, tensor in full.items():
        parts = tensor.chunk(mesh.size(), dim=1)
        part[name] = parts[mesh.get_local_rank()].contiguous()
    # Of full rows, though each rank computes a part: so that the parts add up to the mean.
    count = (labels != -100).sum()
    output = model(**part, shift_labels=part["labels"], num_items_in_batch=count)
    loss: torch.Tensor = output.loss
    return loss * mesh.size()


def positions_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return the position of each token in its row, which Ulysses needs."""
    import torch

    row_positions = torch.arange(tokens.shape[1], device=tokens.device)
    return row_positions.expand_as(tokens).contiguous()


@contextlib.contextmanager
def one_ulysses_of_several() -> Iterator[None]:
    """Undo what DeepSpeed's Ulysses changes in a process, so that another training can follow.

    It refuses to make its groups of ranks twice, and has only private names for them;
    ``tests/launch/test_private_names.py`` fails when they go away. It also replaces each attention
    function of transformers by one that calls the function before it.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as peers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions = dict(ALL_ATTENTION_FUNCTIONS)
    peers._SEQUENCE_PARALLEL_GROUP = None  # noqa: SLF001
    peers._SEQUENCE_DATA_PARALLEL_GROUP = None  # noqa: SLF001
    try:
        yield
    finally:
        for name, function in functions.items():
            ALL_ATTENTION_FUNCTIONS[name] = function


def ulysses_loss(engine: Any, batch: Batch) -> torch.Tensor:
    """Return the loss of full rows, the same on all ranks of a sequence.

    DeepSpeed's Ulysses shards the rows.

    Args:
        engine: A ``DeepSpeedEngine`` around a Llama.
        batch: Full rows, the same on all of these ranks.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as peers
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    device = batch["input_ids"].device
    # The adapter takes a batch of each rank in turn, and all have the same.
    full = {**batch, "position_ids": positions_of(batch["input_ids"])}
    loader: Any = UlyssesSPDataLoaderAdapter(
        [full],
        peers.get_sequence_parallel_rank(),
        peers.get_sequence_parallel_group(),
        peers.get_sequence_parallel_world_size(),
        device,
    )
    part = {}
    for name, tensor in next(loader).items():
        part[name] = tensor.to(device)
    return ulysses_part_loss(engine, part)


def ulysses_part_loss(engine: Any, batch: Batch) -> torch.Tensor:
    """Return the loss of full rows, of which this rank has the part that Ulysses gives it.

    Args:
        engine: The wrapped Llama.
        batch: The part: ``input_ids``, ``position_ids``, ``shift_labels``, which are shifted
            already.
    """
    # https://www.deepspeed.ai/tutorials/ulysses-alst-sequence-parallelism/, with the sum that it
    # advises where the backward pass of ``all_gather`` cannot be used: on gloo that takes the
    # group's ranks for those of all.
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as peers
    from torch import distributed
    from torch.distributed.nn.functional import all_reduce
    from torch.nn.functional import cross_entropy

    group = peers.get_sequence_parallel_group()
    part = {name: tensor.contiguous() for name, tensor in batch.items()}
    labels = part.pop("shift_labels")
    count = (labels != -100).sum()
    distributed.all_reduce(count, group=group)
    output = engine(**part)
    logits = output.logits.flatten(0, 1).float()
    part_sum = cross_entropy(logits, labels.flatten(), reduction="sum")
    loss: torch.Tensor = all_reduce(part_sum / count, group=group)  # type: ignore[no-untyped-call]
    return loss
