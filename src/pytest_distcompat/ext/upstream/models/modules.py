"""Module classes of the classifiers, tiny models with which trainers are tested.

``classifiers.py`` names each class by a text, and says which option value it is:
``model_twice`` is ``Twice``. A rank makes it as ``Twice(features=7, width=13, classes=5)``. All
classes take rows of numbers in float32, (batch, features), and return logits, (batch, classes), in
the dtype in which the trainer has them compute.

They are in a module of their own because defining them imports torch, which pytest's process does
not.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional


class Block(nn.Module):
    """Residual block; FSDP wraps each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width) to the same shape, in the dtype of the parameters."""
        y: torch.Tensor = self.linear(torch.relu(self.norm(x)))
        return x + y


class MLP(nn.Module):
    """Classifier with uneven sizes, buffers and a frozen layer.

    It maps (batch, features) to logits (batch, classes).

    It calls no function of this module: a script for a bug report (``ext/walk/script.py``) has its
    source and Block's alone. Buffers are cast where they are used, because neither FSDP2 nor
    DeepSpeed casts them: a bfloat16 activation times a float32 buffer is float32, which the next
    layer's bfloat16 weights do not accept.
    """

    scale: torch.Tensor
    offset: torch.Tensor

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(features, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.outlet = nn.Linear(width, classes)
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.register_buffer("offset", torch.zeros(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        x = self.inlet(x.to(self.inlet.weight.dtype))
        scale = self.scale.to(x.dtype)
        offset = self.offset.to(x.dtype)
        x = x + self.frozen(x) * scale + offset
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.outlet(x)
        return logits


def _enter(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a model's first layer, in the dtype of the layer's weight.

    Args:
        layer: The layer.
        x: Features in float32.
    """
    hidden: torch.Tensor = layer(x.to(layer.weight.dtype))
    return hidden


def _balance(chosen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the auxiliary loss of a mixture of experts, a scalar.

    https://arxiv.org/abs/2101.03961, equation 4. It is small where all experts have equal shares.

    Args:
        chosen: One-hot (rows, experts): the expert of each row.
        scores: Probabilities (rows, experts), in float32.
    """
    experts = scores.shape[1]
    shares_of_rows = chosen.float().mean(0)
    mean_scores = scores.mean(0)
    return experts * (shares_of_rows * mean_scores).sum()


def _divisor(balance: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what logits are divided by, in a dtype: a scalar that depends on the auxiliary loss.

    So the model learns from the auxiliary loss though trainers compute the loss from logits alone.
    """
    return (1 + 0.1 * balance).to(dtype)


class OneBlock(nn.Module):
    """The layers of a classifier with one block; a subclass says how they are used."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(features, width)
        self.block = Block(width)
        self.outlet = nn.Linear(width, classes)


class Twice(OneBlock):
    """Classifier that runs one block two times, and uses a weight by ``functional.linear``.

    Its parameters are views of one storage, and must not be taken for tied ones because of that. It
    hands attributes that it lacks on to its block, and its forward uses one of them, ``gain``.
    """

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__(features, width, classes)
        parameters = list(self.parameters())
        # One tensor with all values; each parameter becomes a view of its piece.
        storage = torch.cat([parameter.detach().flatten() for parameter in parameters])
        pieces = torch.split(storage, [parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.data = piece.view_as(parameter)
        self.block.gain = 1.0  # type: ignore[assignment]  # a number, no module

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, buffer or module, or else the block's attribute.

        So PEFT's models hand attributes on to what they wrap.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        x = _enter(self.inlet, x)
        x = self.block(x)
        x = self.block(x)
        x = x * self.gain
        return functional.linear(x, self.outlet.weight, self.outlet.bias)


class Heads(nn.Module):
    """Classifier that cuts its hidden features into two heads, and each row along other dimensions.

    Under tensor parallelism what lies between ``inlet`` and ``mix`` are DTensors: torch finds out
    for each operator how its result is sharded. On two ranks a head is one of a rank, so that a
    dimension of two looks like one of one there.
    """

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(features, width)
        self.mix = nn.Linear(width, width)
        self.block = Block(width)
        self.outlet = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        x = _enter(self.inlet, x)
        heads = x.view(len(x), 2, -1)
        # It has no dimension of one to take out.
        heads = heads.squeeze()
        gates = torch.softmax(heads, dim=-1)
        heads = torch.stack([heads, heads * gates], dim=-1).sum(-1)
        # A row is a sequence of one: cut along it, one rank has all and the others have nothing.
        sequence = _cut_along(heads.flatten(1)[:, None], 1)
        strongest = heads.argmax(1)
        chosen = (strongest == 1).to(heads.dtype)
        norms = torch.linalg.vector_norm(heads, ord=torch.inf, dim=1)
        scale = 1 + 0.1 * (norms * chosen).mean()
        mixed = self.mix(torch.tanh(sequence).sum(1))
        logits: torch.Tensor = self.outlet(self.block(mixed) / _whole(scale))
        return logits


def _cut_along(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    """Return a DTensor sharded along that dimension instead; another tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    cut: torch.Tensor = tensor.redistribute(placements=[Shard(dimension)])
    return cut


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a DTensor on each rank; another tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Dropout(OneBlock):
    """Classifier with dropout around its block."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__(features, width, classes)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        x = _enter(self.inlet, x)
        x = self.dropout(x)
        x = self.block(x)
        x = self.dropout(x)
        logits: torch.Tensor = self.outlet(x)
        return logits


class BatchNorm(OneBlock):
    """Classifier that normalizes over the rows of a batch.

    The buffers with running statistics are used in evaluation only.
    """

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__(features, width, classes)
        self.norm: nn.Module = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        x = _enter(self.inlet, x)
        # Without this the norm would subtract the bias of ``inlet`` again, and its gradient would
        # be nothing but rounding.
        x = torch.tanh(x)
        x = self.norm(x)
        logits: torch.Tensor = self.outlet(self.block(x))
        return logits


class SyncBatchNorm(BatchNorm):
    """Classifier that normalizes over the rows of all ranks; in one process it is ``BatchNorm``."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__(features, width, classes)
        self.norm = nn.SyncBatchNorm(width)


class MixtureOfExperts(OneBlock):
    """Classifier that sends each row to one of four experts, and learns to rate all of them alike.

    A row's largest feature chooses the expert, as in https://arxiv.org/abs/2106.04426: rounding
    could decide a choice by scores.
    """

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__(features, width, classes)
        self.router = nn.Linear(width, 4, bias=False)
        experts = [nn.Linear(width, width) for _ in range(4)]
        self.experts = nn.ModuleList(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        expert_of_row = x[:, :4].argmax(-1)
        x = self.block(_enter(self.inlet, x))
        scores = torch.softmax(self.router(x).float(), dim=-1)
        output = x
        # An expert computes on no rows too: all ranks call the same modules, and each parameter has
        # a gradient.
        for number, expert in enumerate(self.experts):
            rows = (expert_of_row == number).nonzero().flatten()
            computed = expert(x[rows])
            weights = scores[rows, number, None].to(x.dtype)
            weighted = (computed * weights).to(x.dtype)
            output = output.index_add(0, rows, weighted)
        balance = _balance(functional.one_hot(expert_of_row, 4), scores)
        logits: torch.Tensor = self.outlet(output)
        return logits / _divisor(balance, output.dtype)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor that is sharded; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Experts(nn.Module):
    """Linear layers with their weights in one tensor.

    Weights are (experts, width, width), biases (experts, width).

    Under expert parallelism the tensors are sharded on their first dimension, and a rank computes
    its own experts.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        weights = torch.randn(count, width, width)
        self.weight = nn.Parameter(weights / width**0.5)
        self.bias = nn.Parameter(torch.zeros(count, width))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return (rows, width) for rows of the same shape.

        Args:
            rows: Rows in the order of their experts.
            counts: How many rows each expert has.
        """
        weights = _local(self.weight)
        biases = _local(self.bias)
        rows_by_expert = torch.split(rows, counts.tolist())
        outputs = []
        # On a rank of expert parallelism all three have this rank's experts alone.
        for rows_of_expert, weight, bias in zip(rows_by_expert, weights, biases, strict=True):
            outputs.append(functional.linear(rows_of_expert, weight, bias))
        return torch.cat(outputs)


class FusedMixture(OneBlock):
    """``MixtureOfExperts`` with the experts' weights in one tensor."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__(features, width, classes)
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = Experts(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        expert_of_row = x[:, :4].argmax(-1)
        x = self.block(_enter(self.inlet, x))
        scores = torch.softmax(self.router(x).float(), dim=-1)
        # Rows in the order of their experts, as ``Experts`` and expert parallelism want them.
        order = expert_of_row.argsort(stable=True)
        counts = torch.bincount(expert_of_row, minlength=4)
        computed_in_order = self.experts(x[order], counts)
        # Back in the order of the batch.
        computed = computed_in_order[order.argsort()]
        score_of_row = scores.gather(1, expert_of_row[:, None])
        weights = score_of_row.to(x.dtype)
        x = x + (computed * weights).to(x.dtype)
        balance = _balance(functional.one_hot(expert_of_row, 4), scores)
        logits: torch.Tensor = self.outlet(x)
        return logits / _divisor(balance, x.dtype)


class DeepSpeedMixture(nn.Module):
    """Classifier with DeepSpeed's mixture of experts.

    https://deepspeed.readthedocs.io/en/latest/moe.html

    A row's largest feature, which is among the inputs of the gate, chooses the expert: the gate
    learns how much of it to take.
    """

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.inlet = nn.Linear(features, width)
        self.block = Block(width)
        # Nothing is dropped or drawn, so that it does not matter how many ranks rows are spread
        # over.
        settings = {"num_experts": 4, "min_capacity": 0, "drop_tokens": False, "use_rts": False}
        # A number for each expert beside the hidden ones: 1 for the expert that is chosen.
        expert_width = width + 4
        # Expert parallelism (``parallel/expert_parallel.py``) makes the layer anew by it, with the
        # experts of one rank.
        self.make_moe = functools.partial(MoE, expert_width, **settings)
        self.moe: Any = self.make_moe(nn.Linear(expert_width, expert_width))
        self.outlet = nn.Linear(expert_width, classes)
        # DeepSpeed makes all experts copies of one layer.
        for expert in self.moe.deepspeed_moe.experts.deepspeed_experts:
            expert.reset_parameters()
        gate = self.moe.deepspeed_moe.gate.wg
        with torch.no_grad():
            # The number for the chosen expert, 1, adds 2 to that expert's score. This is so much
            # that the gate chooses the same expert, and rounding does not decide.
            gate.weight[:, width:] = 2 * torch.eye(4)
            # So large that gradients are clipped in each step, however many ranks average them.
            self.outlet.weight.mul_(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        expert_of_row = x[:, :4].argmax(-1)
        chosen = functional.one_hot(expert_of_row, 4)
        x = self.block(_enter(self.inlet, x))
        x = torch.cat([x, chosen.to(x.dtype)], dim=1)
        # Only an engine connects the layer; the reference is plain torch on the same parameters.
        if self.moe.deepspeed_moe.ep_group is None:
            computed, balance = self._in_one_process(x)
        else:
            computed, balance = self.moe(x)[:2]
        logits: torch.Tensor = self.outlet(x + computed)
        return logits / _divisor(balance, x.dtype)

    def _in_one_process(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the experts compute, and the auxiliary loss.

        Every expert computes on all rows, and a weight of 0 takes out those for which it was not
        chosen.
        """
        layer = self.moe.deepspeed_moe
        output = torch.zeros_like(x)
        gate_weight = layer.gate.wg.weight.float()
        gate_output = functional.linear(x.float(), gate_weight)
        scores = torch.softmax(gate_output, dim=-1)
        chosen = functional.one_hot(scores.argmax(-1), scores.shape[1])
        for number, expert in enumerate(layer.experts.deepspeed_experts):
            computed = expert(x)
            weights = (scores * chosen)[:, number, None]
            output = output + (computed * weights).to(x.dtype)
        return output, _balance(chosen, scores)


class Odd(nn.Module):
    """Classifier with an empty parameter, one of a single number, and buffers of many dtypes.

    A child is named ``module``, as wrappers name what they wrap.
    """

    counts: torch.Tensor
    mask: torch.Tensor
    phase: torch.Tensor
    seen: torch.Tensor

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(features, width)
        self.module = nn.ModuleDict({"module": Block(width)})
        self.nothing = nn.Parameter(torch.zeros(0, width))
        self.gain = nn.Parameter(torch.ones(1))
        self.outlet = nn.Linear(width, classes)
        self.register_buffer("counts", torch.arange(width))
        self.register_buffer("mask", torch.arange(width) % 2 == 0)
        self.register_buffer("phase", torch.exp(1j * torch.arange(3)))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        x = _enter(self.inlet, x)
        counts = self.counts.to(x.dtype)
        scaled = x * counts / len(self.counts)
        x = torch.where(self.mask, x, scaled)
        x = self.module["module"](x)
        x = x * self.phase.real[0].to(x.dtype)
        logits: torch.Tensor = self.outlet(x)
        return logits * self.gain + self.nothing.sum()


class Scalar(OneBlock):
    """Classifier whose logits a parameter of no dimension scales."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__(features, width, classes)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        x = self.block(_enter(self.inlet, x))
        logits: torch.Tensor = self.outlet(x)
        return logits / self.temperature


class Transposed(nn.Module):
    """Classifier whose last weight is stored column by column."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(features, width)
        self.block = Block(width)
        columns = torch.randn(width, classes)
        self.weight = nn.Parameter(columns.t() / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        x = self.block(_enter(self.inlet, x))
        return functional.linear(x, self.weight)


class WrapperNames(nn.Module):
    """Classifier whose modules have the names under which torch's wrappers keep what they wrap."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(features, width)
        inner = nn.Sequential(OrderedDict(_checkpoint_wrapped_module=Block(width)))
        # The names of torch.compile and of FSDP1; the innermost is that of activation
        # checkpointing.
        self._orig_mod = nn.Sequential(OrderedDict(_fsdp_wrapped_module=inner))
        self.outlet = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        x = self._orig_mod(_enter(self.inlet, x))
        logits: torch.Tensor = self.outlet(x)
        return logits


class Branch(OneBlock):
    """Classifier with a layer that is skipped where no row of a batch needs it."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__(features, width, classes)
        self.branch = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        needed = x[:, :1] > 0
        x = self.block(_enter(self.inlet, x))
        if needed.any():
            x = x + self.branch(x) * needed
        logits: torch.Tensor = self.outlet(x)
        return logits


class Convolutions(nn.Module):
    """Classifier with convolutions along the hidden features, one of them in groups of channels."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(features, width)
        self.widen = nn.Conv1d(1, 4, kernel_size=3, padding=1)
        self.grouped = nn.Conv1d(4, 4, kernel_size=3, padding=1, groups=2)
        self.block = Block(width)
        self.outlet = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        x = _enter(self.inlet, x)
        channels = torch.tanh(self.widen(x[:, None]))
        x = x + self.grouped(channels).sum(1)
        logits: torch.Tensor = self.outlet(self.block(x))
        return logits


class Inlet(nn.Module):
    """First layer of a run of layers: it takes features in float32."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, features) to (batch, width), in the dtype of the weight."""
        return _enter(self.linear, x)


class Layers(nn.Sequential):
    """Classifier that is a run of layers, whose parameters have their numbers as names."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__(
            Inlet(features, width), Block(width), Block(width), nn.Linear(width, classes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        # Trainer passes the features by this argument's name, which nn.Sequential calls ``input``.
        for layer in self:
            x = layer(x)
        return x


class Ends(nn.Module):
    """First and last layer with one weight, as a language model's embeddings have."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        # Larger weights make large logits, whose losses show rounding more.
        self.weight = nn.Parameter(torch.randn(width, features) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, features) to (batch, width)."""
        return functional.linear(x.to(self.weight.dtype), self.weight)

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width) to (batch, features)."""
        return functional.linear(x, self.weight.t())


class Given(nn.Module):
    """Class for libraries that make a module of a class: it makes the module that it is given."""

    def __new__(cls, module: nn.Module) -> Any:
        """Return the module itself."""
        return module


class TiedLayers(nn.Module):
    """Run of layers of which the first and the last have one weight.

    Modules have the names that DeepSpeed's ``PipelineModule`` gives them: ``tied_modules`` for what
    two stages have, and their number for others. It has a class for each feature.
    """

    def __init__(self, features: int, width: int, _classes: int) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({"ends": Ends(features, width)})
        # DeepSpeed's converter of checkpoints fails with fewer (docs/upstream.md).
        for number in (1, 2, 3):
            self.add_module(str(number), Block(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        ends: Any = self.tied_modules["ends"]
        x = ends(x)
        for name in ("1", "2", "3"):
            x = self.get_submodule(name)(x)
        logits: torch.Tensor = ends.back(x)
        return logits


class Tiled(OneBlock):
    """Classifier whose block takes the rows in two parts by DeepSpeed's ``TiledMLP``.

    https://www.deepspeed.ai/tutorials/ulysses-alst-sequence-parallelism

    The backward pass has one of its own for each part, so that a gradient is whole only after the
    last. ``TiledMLP`` says so to the engine.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in the dtype of the last product."""
        x = _enter(self.inlet, x)
        # The reference takes all rows at once, in one process.
        if distributed.is_initialized():
            from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

            x = TiledMLP.apply(_call, self.block, x, 2, list(self.block.parameters()))
        else:
            x = self.block(x)
        logits: torch.Tensor = self.outlet(x)
        return logits


def _call(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return what a module computes of some rows: the function that ``TiledMLP`` takes."""
    computed: torch.Tensor = module(rows)
    return computed
