"""Trainers that cut, recompute or compile other modules than the option's."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any
from unittest import mock

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.ext.upstream.drivers import _options
from pytest_distcompat.strategies import WrapSpec

from .declare import UNCUT, Accelerate, Torch, twin

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch.nn import Module

    from pytest_distcompat.precisions import Precision

UNCOMPILED = r"^rank 0: torch\.compile made no graph in three steps: the model runs uncompiled"


@twin("units", "fsdp2-fp32-w2-model_mlp", match=UNCUT["units"])
class OneUnit(Torch):
    """The policy names no class of the model: everything is gathered at once."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
        return model


@twin("units", "fsdp1-fp32-w2-model_mlp", match=UNCUT["units"])
class OneUnitAccelerate(Accelerate):
    """The twin above by accelerate's plugin, which does not report it."""

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        settings = super().settings(precision, cell)
        settings["fsdp_plugin"].auto_wrap_policy = None
        settings["fsdp_plugin"].transformer_cls_names_to_wrap = None
        return settings


@twin(
    "units",
    "fsdp2-fp32-w2-model_mlp",
    match=r"FSDP's units are 'blocks\.0\.linear', 'blocks\.0\.norm', 'blocks\.1\.linear', 'blocks\.1\.norm', the root",
)
class ChildrenOneByOne(Torch):
    """The children of the blocks are the units: a collective for each of them."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch.distributed.fsdp import fully_shard

        for block in self.wrap_spec.block_modules(model):
            for child in block.children():
                fully_shard(child)
        fully_shard(model)
        return model


@twin(
    "units",
    "ddp-fp32-w2-model_mlp-activation_checkpointing",
    "fsdp2-fp32-w2-model_mlp-activation_checkpointing",
    match=r"the activations are recomputed of 'blocks\.0\.linear', 'blocks\.0\.norm', [^;]*; expected 'blocks\.0', 'blocks\.1'",
)
class RecomputesChildren(Torch):
    """Recomputed are the children of the blocks, so that what is between them is kept."""

    def build(self, model: Module) -> None:
        recompute_model = _options.recompute

        def children(model: Module, blocks: Iterable[Module], cell: Cell) -> None:
            recompute_model(model, [child for block in blocks for child in block.children()], cell)

        with mock.patch.object(_options, "recompute", children):
            super().build(model)


@twin(
    "units",
    "fsdp2-fp32-w2-activation_checkpointing_selective",
    match=r"^rank 0: blocks computed 14 of 16 matrix products again; expected none in selective activation checkpointing\nrank 1",
)
class ForgetsTheSelection(Torch):
    """Asked to keep some activations, and keeps none."""

    def build(self, model: Module) -> None:
        recompute_model = _options.recompute

        def all_of(model: Module, blocks: Iterable[Module], cell: Cell) -> None:
            recompute_model(model, blocks, cell.without("activation_checkpointing"))

        with mock.patch.object(_options, "recompute", all_of):
            super().build(model)


@twin(
    "units",
    "ddp-fp32-w2-activation_checkpointing_selective",
    match=r"(?s)^rank 0: the activations are recomputed of nothing; .*rank 0: blocks computed nothing again in the backward pass",
)
class KeepsAll(Torch):
    """Asked to recompute some activations, and recomputes none."""

    def build(self, model: Module) -> None:
        with mock.patch.object(_options, "recompute"):
            super().build(model)


@twin(
    "units",
    "zero1-fp32-w2-model_mlp-activation_checkpointing",
    "ddp-fp32-w2-model_mlp-activation_checkpointing",
    match=r"^rank 0: the activations are recomputed of nothing; expected 'blocks\.0', 'blocks\.1'",
)
class NeverRecomputes(AccelerateDriver):
    """The option is read by FSDP's plugin only."""

    def _recompute(self, model: Any) -> None:
        pass


@twin(
    "units",
    "fsdp2-fp32-w2-model_mlp",
    match=r"the activations of 'blocks\.0', 'blocks\.1' are recomputed without activation_checkpointing",
)
class RecomputesUnasked(Torch):
    """A third more to compute, and nobody asked for it."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        for block in self.wrap_spec.block_modules(model):
            # As transformers sets it on its layers, which keeps the names.
            vars(block)["gradient_checkpointing"] = True
        return super().wrap(model, precision, cell, device)


@twin(
    "units",
    "ddp-fp32-w2-model_mlp-compile_aot_eager",
    match=UNCOMPILED + r"(?s:.*)\nrank 0: nothing is wrapped by torch\.compile",
)
class CompilesNothing(Torch):
    """The result of ``torch.compile`` is thrown away."""

    def build(self, model: Module) -> None:
        with mock.patch.object(_options, "compiled", lambda model, how: model):
            super().build(model)


@twin(
    "units",
    "fsdp2-fp32-w2-model_mlp-compile_aot_eager",
    match=UNCOMPILED + r"\nrank 1: torch\.compile made no[^\n]+$",
)
class FallsBack(Torch):
    """Everything is wrapped and everything runs uncompiled, as under any dispatch mode."""

    def build(self, model: Module) -> None:
        import torch

        torch.compiler.set_stance("force_eager")
        super().build(model)


@twin("units", "zero1-fp32-w2-model_mlp-compile_aot_eager", match=UNCOMPILED)
class FallsBackZero(AccelerateDriver):
    """The twin above with ZeRO's flat masters."""

    def build(self, model: Module) -> None:
        import torch

        torch.compiler.set_stance("force_eager")
        super().build(model)


@twin(
    "units",
    "ddp-fp32-w2-model_mlp-compile_regional",
    match=r"what is compiled is 'blocks\.0'; expected each of 'blocks\.0', 'blocks\.1'",
)
class CompilesOneBlock(Torch):
    """Of the blocks that are to be compiled one by one only the first is."""

    def build(self, model: Module) -> None:
        some = _options.compile_blocks
        with mock.patch.object(_options, "compile_blocks", lambda how, blocks: some("partial", blocks)):
            super().build(model)


@twin(
    "units",
    "fsdp1-fp32-w2-model_mlp-ignored_modules",
    "fsdp2-fp32-w2-model_mlp-ignored_modules",
    match=r"rank 0: 'frozen\.weight' is sharded \((DTensor|FSDP1 shard), \S.*\); it was to be left out of the sharding",
)
class IgnoresNothing(Torch):
    """Shards a module that should be excluded."""

    @property
    def wrap_spec(self) -> WrapSpec:
        return dataclasses.replace(super().wrap_spec, ignored_modules=())
