"""Layers of their own types, so that a converted model differs from another one; they compute as torch's do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Linear(torch.nn.Linear):
    """As accelerate makes it."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, params_dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=params_dtype)


class LayerNorm(torch.nn.LayerNorm):
    """As accelerate makes it."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, *, params_dtype: torch.dtype) -> None:
        super().__init__(hidden_size, eps=eps, dtype=params_dtype)


class TransformerLayer(torch.nn.Module):
    """Asked for by name only."""


@contextlib.contextmanager
def fp8_autocast(enabled: bool = False, fp8_recipe: object | None = None) -> Iterator[None]:
    """Remembers that it was on, for whoever wants to know."""
    outer = fp8_state.enabled
    fp8_state.enabled = enabled
    try:
        yield
    finally:
        fp8_state.enabled = outer


class _State:
    enabled = False


fp8_state = _State()
