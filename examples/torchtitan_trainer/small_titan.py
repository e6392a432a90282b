"""Rows of random tokens for torchtitan's Trainer, and its debug model small enough for a CPU."""

# torchtitan is not among the libraries that are installed to check types.
# mypy: disable-error-code="misc"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.tools import utils

VOCABULARY, LENGTH, ROWS = 2048, 16, 2


if not torch.cuda.is_available():
    # torchtitan knows accelerators alone; its other modules read these two when they are imported.
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        set_device=torch.cpu.set_device,
        current_device=lambda: 0,
        get_device_name=str,
        get_device_properties=lambda _: SimpleNamespace(total_memory=1),
        memory_stats=lambda _: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import IGNORE_INDEX  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.config import Configurable  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


def batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of one micro-batch; ranks and micro-batches have different numbers of labels."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(100 * number + rank))
    labels = tokens[:, 1:].clone()
    labels[0, LENGTH - (number + 2 * rank) % 5 :] = IGNORE_INDEX
    return tokens[:, :-1], labels


class Rows(BaseDataLoader):
    """The batches of one data-parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No settings."""

    def __init__(self, dp_rank: int, **_others: object) -> None:
        self.rank, self.number = dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            inputs, labels = batch(self.number, self.rank)
            self.number += 1
            yield {"input": inputs}, labels

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.number = state_dict["number"]


class NoTokenizer(Configurable):
    """Rows are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """No settings."""

    def __init__(self, **_others: object) -> None:
        """Take none of them."""


class LastMetrics(MetricsProcessor):
    """Metrics that keep the loss and the gradient norm of the last step."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """Those of torchtitan."""

    def log(self, _step: int, loss: float, _largest_loss: float, grad_norm: float, **_others: Any) -> None:
        self.loss, self.grad_norm = loss, grad_norm


def small_config() -> Trainer.Config:
    """Return torchtitan's configuration of its debug Llama, two layers of it, on the rows of this module."""
    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        # On a CPU flex attention has no backward pass.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dataloader, config.tokenizer = Rows.Config(), NoTokenizer.Config()
    config.metrics = LastMetrics.Config(log_freq=1)
    config.training.seq_len, config.training.local_batch_size = LENGTH, ROWS
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.activation_checkpoint = None
    # With torch 2.13 the default, spmd_types, hands plain parameters to fully_shard, which refuses them.
    config.parallelism.spmd_backend = "partial_dtensor"
    return config
