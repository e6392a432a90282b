"""State beside model and optimizer: averages of the weights, and a count of micro-batches.

A checkpoint must bring back such state too, which the check ``extra_state`` tests. The drivers for
torch and accelerate, by which these trainers are tested, have it:

- With option ``ema`` of a cell (``fsdp2-fp32-w2-model_mlp-ema``) they keep an exponential moving
  average of the weights: ``averaged``, torch's own object, or ``AverageOfWeights``, an object that
  accelerate registers. ``build`` makes it, ``step`` updates it.
- The driver for accelerate registers a ``Progress`` in every cell.

``unsupported_by_torch`` and ``unsupported_by_accelerate`` say at collection which cells have no
average.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.parallel.reasons import first_reason
from pytest_distcompat.strategies import STRATEGIES

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.cell import Cell

#: How much of the average each step keeps: average = DECAY * average + (1 - DECAY) * weights. It is
#: small, so that a lost average shows after three steps.
DECAY = 0.5
#: Options that were tried beside ``ema``.
_BESIDE = frozenset(
    {"model", "ema", "grad_accum", "activation_checkpointing", "frozen", "param_groups"}
)
#: The same of the drivers for torch and accelerate.
_OF_TORCH = _BESIDE | {"state_dict", "cpu_offload", "async_save", "reshard_after_forward"}
_OF_ACCELERATE = _BESIDE | {"reshard_after_forward"}


def unsupported_by_torch(cell: Cell) -> str | None:
    """Return why the torch driver keeps no average in the cell; None if it does."""
    return first_reason(
        (
            cell.strategy == "fsdp1",
            "FSDP1 gathers the weights for an average; FSDP2 shards it as it does the model",
        ),
        (_is_untried(cell, _OF_TORCH), "an average beside some of these options is not tried"),
    )


def unsupported_by_accelerate(cell: Cell) -> str | None:
    """Return why the accelerate driver registers no average in the cell; None if it does."""
    strategy = STRATEGIES.get(cell.strategy)
    return first_reason(
        (
            cell.strategy == "fsdp1" or strategy.zero_stage == 3,
            f"{cell.strategy} gathers the weights for an average, which a step does not",
        ),
        (
            _is_untried(cell, _OF_ACCELERATE),
            "an average beside some of these options is not tried",
        ),
    )


def _is_untried(cell: Cell, tried: frozenset[str]) -> bool:
    """Tell whether the cell has an option that was not tried beside ``ema``."""
    return any(name not in tried for name, _ in cell.options)


def averaged(model: Module) -> Any:
    """Return torch's ``AveragedModel`` of a model that nothing wraps yet.

    https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
    """
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    moving_average = get_ema_multi_avg_fn(DECAY)  # type: ignore[no-untyped-call]
    return AveragedModel(model, multi_avg_fn=moving_average)


class Progress:
    """A count of micro-batches, alike on all ranks, as ``register_for_checkpointing`` takes it."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the count."""
        self.batches = state["batches"]


class AverageOfWeights:
    """An average of what this rank has of the weights, as diffusers' ``EMAModel`` keeps it.

    Args:
        model: The prepared model.
    """

    def __init__(self, model: Module) -> None:
        self.weights: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            self.weights[name] = parameter.detach().clone()

    def update(self, model: Module) -> None:
        """Move the average towards the weights."""
        for name, parameter in model.named_parameters():
            self.weights[name].lerp_(parameter.detach(), 1 - DECAY)

    def state_dict(self) -> dict[str, Any]:
        """Return the average by the names of the parameters."""
        return self.weights

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the average in place."""
        for name, weight in self.weights.items():
            weight.copy_(state[name])
