"""Drivers of models with the sizes of their published configurations, which are simulated (``simulate.py``)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from pytest_distcompat import Cell
from pytest_distcompat.drivers.torch import TorchDriver

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.world import World

#: Tokens of the one row that a rank learns from.
LENGTH = 128


def llama_70b() -> Module:
    """Return Llama 3 70B: https://huggingface.co/meta-llama/Meta-Llama-3-70B/blob/main/config.json."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            use_cache=False,
        )
    )
    return model


def qwen3_235b() -> Module:
    """Return Qwen3-235B-A22B: https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model: Module = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            num_hidden_layers=94,
            num_attention_heads=64,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            use_cache=False,
            # Of the implementations the one whose shapes do not depend on where the router sends rows.
            experts_implementation="grouped_mm",
        )
    )
    return model


def batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Return one row of tokens."""
    import torch

    tokens = torch.randint(
        0, 128256, (1, LENGTH), generator=torch.Generator().manual_seed(1000 * step + rank)
    )
    return {"input_ids": tokens, "labels": tokens.clone()}


class Llama70B(TorchDriver):
    """The torch driver with Llama 3 70B."""

    name: ClassVar[str] = "llama_70b"
    make = staticmethod(llama_70b)

    def __init__(self, cell: Cell, world: World) -> None:
        super().__init__(cell, world)
        self.tiny = dataclasses.replace(self.tiny, make=self.make, batch=batch)

    @classmethod
    def unsupported_reason(cls, cell: Cell, device: str = "cpu") -> str | None:
        """Return what it returns for the tiny Llama, which has fewer heads to cut."""
        return super().unsupported_reason(cell.without("tp"), device)


class Qwen235B(Llama70B):
    """The torch driver with Qwen3-235B-A22B, a mixture of experts."""

    name: ClassVar[str] = "qwen3_235b"
    blocks = ("Qwen3MoeDecoderLayer",)
    make = staticmethod(qwen3_235b)
