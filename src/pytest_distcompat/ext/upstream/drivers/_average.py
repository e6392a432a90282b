"""State beside model and optimizer: averages of the weights, and a count of micro-batches.

A checkpoint must bring back such state too, which the check ``extra_state`` tests. The drivers for
torch and accelerate, by which these trainers are tested, have it:

- With option ``ema`` of a cell (``fsdp2-fp32-w2-model_mlp-ema``) they keep an exponential moving
  average of the weights: ``averaged``, torch's own object, or ``AverageOfWeights``, an object that
  accelerate registers. ``build`` makes it and ``step`` updates it. So does the reference, the same
  training in one process, with which the check ``parity`` compares the average. Under DDP and FSDP2
  each rank averages what it has of the weights; under FSDP1 and ZeRO-3, where that is a piece of a
  flattened tensor, each gathers them first (``gathered_weights``).
- The driver for accelerate registers a ``Progress`` in every cell, and counts in it.

``unsupported_by_torch`` and ``unsupported_by_accelerate`` say at collection which cells have no
average.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.strategies import STRATEGIES

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.cell import Cell

#: How much of the average each step keeps: average = DECAY * average + (1 - DECAY) * weights. It is
#: small, so that a lost average shows after three steps.
DECAY = 0.5
#: Options that a cell may have beside ``ema``: those with which an average was tried. A cell with
#: any other option gets no average, because nobody knows whether it works.
_BESIDE = frozenset(
    {"model", "ema", "grad_accum", "activation_checkpointing", "frozen", "param_groups"}
)
#: All options that a cell with ``ema`` may have with the driver for torch, and with that for
#: accelerate.
_OF_TORCH = _BESIDE | {"state_dict", "cpu_offload", "async_save", "reshard_after_forward"}
_OF_ACCELERATE = _BESIDE | {"reshard_after_forward"}
#: All that it may have with either driver where ranks gather the weights for the average.
_GATHERED = frozenset({"model", "ema"})


def unsupported_by_torch(cell: Cell) -> str | None:
    """Return why the torch driver keeps no average in a cell with ``ema``; None if it does."""
    tried = _GATHERED if cell.strategy == "fsdp1" else _OF_TORCH
    return _untried_reason(cell, tried)


def unsupported_by_accelerate(cell: Cell) -> str | None:
    """Return why the accelerate driver registers no average in a cell with ``ema``, or None."""
    gathers = cell.strategy == "fsdp1" or STRATEGIES.get(cell.strategy).zero_stage == 3
    tried = _GATHERED if gathers else _OF_ACCELERATE
    return _untried_reason(cell, tried)


def _untried_reason(cell: Cell, tried: frozenset[str]) -> str | None:
    """Return the reason for a cell with an option that was not tried beside ``ema``; else None."""
    for name, _ in cell.options:
        if name not in tried:
            return "an average beside some of these options is not tried"
    return None


def averaged(model: Module) -> Any:
    """Return torch's ``AveragedModel`` of a model that nothing wraps yet.

    https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
    """
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    moving_average = get_ema_multi_avg_fn(DECAY)  # type: ignore[no-untyped-call]
    return AveragedModel(model, multi_avg_fn=moving_average)


@contextlib.contextmanager
def gathered_weights(model: Module) -> Iterator[None]:
    """Have each rank hold the whole weights of a model under FSDP1 or ZeRO-3 in this context.

    Of another model each rank has what it had: all weights under DDP, its shards under FSDP2.

    https://docs.pytorch.org/docs/stable/fsdp.html (summon_full_params),
    https://deepspeed.readthedocs.io/en/latest/zero3.html (GatheredParameters)
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    parameters = list(model.parameters())
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            yield
    elif any(hasattr(parameter, "ds_id") for parameter in parameters):
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            yield
    else:
        yield


class Progress:
    """A count of micro-batches, alike on all ranks, as ``register_for_checkpointing`` takes it."""

    def __init__(self) -> None:
        #: The driver adds 1 after each micro-batch.
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the count."""
        self.batches = state["batches"]


class AverageOfWeights:
    """An average of what this rank has of the weights, as diffusers' ``EMAModel`` keeps it.

    Under FSDP1 and ZeRO-3 it is that of the whole weights.

    Args:
        model: The prepared model, without DDP and DeepSpeed's engine around it.
    """

    def __init__(self, model: Module) -> None:
        self.weights: dict[str, Any] = {}
        with gathered_weights(model):
            for name, parameter in model.named_parameters():
                self.weights[name] = parameter.detach().clone()

    def update(self, model: Module) -> None:
        """Move the average towards the weights."""
        with gathered_weights(model):
            for name, parameter in model.named_parameters():
                self.weights[name].lerp_(parameter.detach(), 1 - DECAY)

    def state_dict(self) -> dict[str, Any]:
        """Return the average by the names of the parameters."""
        return self.weights

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the average in place."""
        for name, weight in self.weights.items():
            weight.copy_(state[name])
