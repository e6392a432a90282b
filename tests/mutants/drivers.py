"""Trainers that some bugs need: with a model that the built-in drivers do not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.accelerate import AccelerateDriver

if TYPE_CHECKING:
    from torch.nn import Module


class Quantized(AccelerateDriver):
    """One layer writes its quantisation beside its weight, as bitsandbytes' Linear4bit does, until the weight is sharded.

    https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/nn/modules.py
    """

    def build_model(self) -> Module:
        """With one more entry in its state dict."""
        import torch

        model = super().build_model()
        layer: Any = model.get_submodule("model.layers.0.mlp.down_proj")
        layer.weight.quant_state = torch.ones(4)
        layer.register_state_dict_post_hook(_with_quantization)
        return model


def _with_quantization(layer: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    quantization = getattr(layer.weight, "quant_state", None)
    if quantization is not None:
        state[f"{prefix}weight.absmax"] = quantization
