"""A LlamaForCausalLM of about 25 thousand parameters, with its own and with tied output embeddings."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pytest_distcompat.models._base import TinyModel

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.models._base import Batch

VOCABULARY = 128


def _make(*, tied: bool) -> Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    model: Module = LlamaForCausalLM(config).float()
    return model


def _batch(step: int, rank: int) -> Batch:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _loss(model: Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


_PRELOAD = ("transformers", "transformers.models.llama.modeling_llama")

LLAMA = TinyModel(
    "llama", ("LlamaDecoderLayer",), functools.partial(_make, tied=False), _batch, _loss, preload=_PRELOAD, order=0
)
LLAMA_TIED = TinyModel(
    "llama_tied", ("LlamaDecoderLayer",), functools.partial(_make, tied=True), _batch, _loss, preload=_PRELOAD, order=1
)
