"""Trainers whose names do not map: in memory, in the optimizer or in what they save."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.accelerate import AccelerateDriver

from .declare import CLIPPING, GRADIENTS, MEMORY, PARITY, START, Accelerate, Torch, twin

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision


@twin(
    "names",
    "ddp-fp32-w2-model_mlp-compile_aot_eager",
    match=r"key '_orig_mod\.module\.blocks\.0\.linear\.bias' is no name of the unwrapped model; expected 'blocks\.0\.linear\.bias'",
)
@twin(
    "names",
    "fsdp2-fp32-w2-model_mlp-compile_aot_eager",
    match=r"key '_orig_mod\.blocks\.0\.linear\.bias' is no name of the unwrapped model; expected 'blocks\.0\.linear\.bias'",
)
class CompiledNames(Torch):
    """A compiled model saved by its own ``state_dict()``, as accelerate saved one (#3554)."""

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "model": self.model.state_dict()}


@twin(
    "names",
    "ddp-fp32-w2-model_mlp",
    match=r"live parameter '_orig_mod\.module\.(\S+)' maps to '_orig_mod\.module\.\1', which is no",
)
class CompiledUnasked(Torch):
    """The trainer compiles though the cell does not say so: a prefix that nobody accounts for."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        import torch

        # Names do not depend on the backend, and this one costs least.
        compiled: Any = torch.compile(super().wrap(model, precision, cell, device), backend="eager")
        wrapped: Module = compiled
        return wrapped


@twin(
    "names", "ddp-fp32-w2-model_mlp", match=r"key 'module\.blocks\.0\.linear\.bias' is no name(?s:.*)expected 'blocks"
)
class WrappersNames(Torch):
    """``ddp.state_dict()`` instead of ``ddp.module.state_dict()``."""

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "model": self.model.state_dict()}


@twin(
    "names",
    "fsdp1-fp32-w2-model_mlp-state_dict_full",
    match=r"key '_fsdp_wrapped_module\.[\w.]+' is no name(?s:.*)expected '(blocks|inlet)\.",
)
class LiveNames(Torch):
    """Parameters saved as ``named_parameters`` calls them."""

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        names = [name for name, _ in self.model.named_parameters()]
        plain = [name.replace("_fsdp_wrapped_module.", "") for name in names]
        return {**state, "model": dict(zip(names, (state["model"].get(name) for name in plain), strict=True))}


@twin(
    "names",
    "fsdp2-fp32-w2-model_mlp-activation_checkpointing",
    match=r"key 'blocks\.0\._checkpoint_wrapped_module\.linear\.bias' is no name(?s:.*)expected 'blocks\.0\.linear\.bias'",
)
class CheckpointedNames(Torch):
    """Parameters saved as ``named_parameters`` calls them, with a segment for the recomputation."""

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "model": dict(self.model.named_parameters())}


class RecomputesInside(AccelerateDriver):
    """Sound: the blocks themselves recompute, and nothing wraps them."""

    def _recompute(self, model: Any) -> None:
        from torch.utils.checkpoint import checkpoint

        for block in self.wrap_spec.block_modules(model):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


# What DeepSpeed 0.19 does by itself to a model whose blocks are wrapped: the segment stays in ``param_shapes``.
twin(
    "names",
    "zero2-fp32-w2-model_mlp-activation_checkpointing",
    "zero3-fp32-w2-model_mlp-activation_checkpointing",
    match=r":param_shapes': 8 keys have the extra segment `_checkpoint_wrapped_module\.`(?s:.*)is no name of the unwrapped model",
    sound="twins.twins_names:RecomputesInside",
)(AccelerateDriver)


@twin(
    "names",
    "fsdp2-fp32-w2-model_mlp",
    "ddp-bf16_pure-w2-model_mlp",
    match=r"live parameter '(module\.)?head\.weight' maps to 'head\.weight'(?s:.*)'outlet\.weight' of the unwrapped model has no",
)
class Renamed(Torch):
    """The last layer is called otherwise once the trainer had its hands on it."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        outlet = model.get_submodule("outlet")
        del model.outlet
        model.head = outlet
        # So that forward still finds it, but not as a submodule.
        model.__dict__["outlet"] = outlet
        return super().wrap(model, precision, cell, device)


@twin("names", "fsdp2-fp32-w2-model_mlp", match=r"1 of 14 parameters are in no saved file, first 'outlet\.weight'")
class ParameterNotSaved(Torch):
    """The file lacks a parameter; a loader that is not strict will not mind."""

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        del state["model"]["outlet.weight"]
        return state


@twin("names", "ddp-fp32-w2-model_mlp", match=r"1 of 1 persistent buffers are in no saved file, first 'scale'")
class BufferNotSaved(Torch):
    """The file has the parameters alone, and running statistics are lost."""

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        del state["model"]["scale"]
        return state


@twin(
    "names",
    "zero1-fp32-w2-model_mlp",
    "zero3-bf16_upcast-w2-model_mlp",
    match=r"2 of 14 parameters are in no saved file, first 'frozen\.bias', 'frozen\.weight'",
)
class FrozenNotSaved(AccelerateDriver):
    """DeepSpeed excludes frozen parameters: the base model is in no file."""

    def save(self, directory: Path) -> None:
        self.accelerator.save_state(str(directory), exclude_frozen_parameters=True)


@twin(
    "names",
    "fsdp2-fp32-w2-model_llama_tied",
    match=r"2 live parameters map to 'model\.embed_tokens\.weight'; expected one",
    also={**PARITY, **MEMORY, **GRADIENTS},
)
class Untied(Torch):
    """Output embeddings become a parameter of their own."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch import nn

        head: Any = model.get_submodule("lm_head")
        head.weight = nn.Parameter(head.weight.detach().clone())
        return super().wrap(model, precision, cell, device)


@twin(
    "names",
    "fsdp2-fp32-w2-model_mlp",
    match=r"key 'module\.blocks\.0\.linear\.bias' is no name of the unwrapped model",
)
class OptimizerPrefix(Torch):
    """Optimizer state saved under the names of a wrapper."""

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        states = state["optimizer"]["state"]
        return {**state, "optimizer": {"state": {f"module.{name}": value for name, value in states.items()}}}


@twin("names", "fsdp2-fp32-w2-model_mlp", match=r"key '0' is no name of the unwrapped model")
class OptimizerNumbers(Torch):
    """Optimizer state saved by position, as accelerate saved it (#3971): another order is another model."""

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        states = enumerate(state["optimizer"]["state"].values())
        return {**state, "optimizer": {"state": {str(number): value for number, value in states}}}


@twin(
    "names",
    "fsdp1-fp32-w2-model_mlp",
    match=r"1 of 12 trainable parameters' optimizer states are in no saved file, first 'outlet\.weight'",
)
class OptimizerStateNotSaved(Torch):
    """The file lacks the state of one parameter."""

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        del state["optimizer"]["state"]["outlet.weight"]
        return state


@twin("names", "zero3-fp32-w2-model_mlp", match=r"'inlet\.weight' has shape \(0,\); \(13, 7\) in the unwrapped model")
class PlaceholdersSaved(Accelerate):
    """Weights exported from ZeRO-3 without gathering them: every name is right and every tensor is empty."""

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        settings = super().settings(precision, cell)
        # Below 100 000 elements DeepSpeed would keep a parameter whole, for speed.
        settings["deepspeed_plugin"].deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return settings

    def save(self, directory: Path) -> None:
        import torch

        super().save(directory)
        if self.world.rank == 0:
            torch.save(self.model.module.state_dict(), directory / "export.bin")


@twin(
    "names",
    "fsdp2-fp32-w2",
    match=r"live parameter 'lm_head\.weight' has shape \(136, 32\); \(128, 32\) in the unwrapped model",
    also={**PARITY, **MEMORY, **GRADIENTS, "active": r"store 4352 elements of 'lm_head\.weight', which has 4096"},
)
class PaddedVocabulary(Torch):
    """Output embeddings padded to a rounder size, for speed."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch import nn

        head: Any = model.get_submodule("lm_head")
        head.weight = nn.Parameter(nn.functional.pad(head.weight.detach(), (0, 0, 0, 8)))
        config: Any = model.config
        config.vocab_size += 8
        return super().wrap(model, precision, cell, device)


@twin(
    "names",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^build_model\(\) gives each rank other values of 'blocks\.0\.linear\.bias' and \d+ others, and build\(\) not those of",
    also={**PARITY, **CLIPPING, **GRADIENTS, **START},
)
class EachRankItsOwnModel(Torch):
    """Each rank makes the model from a seed of its own: DDP would send rank 0's to all, FSDP2 shards what there is."""

    def build_model(self) -> Module:
        import torch

        model = super().build_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.1 * self.world.rank)
        return model
