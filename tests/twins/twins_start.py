"""Trainers that do not start from the model that they are given."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
from pytest_distcompat.models import model_of

from .declare import CLIPPING, GRADIENTS, PARITY, Torch, twin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn import Module

OTHER_TRAINING = {**PARITY, **GRADIENTS, **CLIPPING}


@twin(
    "start",
    "fsdp2-fp16_mixed-w2-model_mlp",
    match=r"^parameter 'blocks\.0\.linear\.bias' and \d+ others: other values after build than were loaded$",
)
class RoundsBeforeSharding(Torch):
    """Casts the model to the dtype that it computes in, and upcasts that: masters with half of the bits.

    The tolerances of the precision hide it from every check that compares with the reference.
    """

    def build(self, model: Module) -> None:
        super().build(model.half().float())


@twin(
    "start",
    "ddp-fp32-w2-model_mlp",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^parameter 'blocks\.0\.linear\.bias' and \d+ others: other values after build than were loaded$",
    also=OTHER_TRAINING,
)
class MakesItAnew(Torch):
    """Makes the model from its configuration, and forgets to load the given weights."""

    def build(self, model: Module) -> None:
        import torch

        torch.manual_seed(7)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.reset_parameters()
        super().build(model)


@twin(
    "start",
    "zero1-fp32-w2-model_mlp",
    "zero2-fp32-w2-model_mlp",
    match=r"^master 'blocks\.0\.linear\.bias' and \d+ others: other values after build than were loaded$",
)
class DecaysMasters(DeepSpeedDriver):
    """Makes the optimizer's state by a step without gradients, in which weight decay is little but not nothing.

    As DeepSpeed does it at stage 0: docs/upstream/deepspeed_stage0_first_step.py.
    """

    def build(self, model: Module) -> None:
        super().build(model)
        for partition in self.optimizer.single_partition_of_fp32_groups:
            partition.data.mul_(1 - 1e-6)


@twin(
    "start",
    "ddp-fp32-w2-model_mlp",
    "zero2-bf16_upcast-w2-model_mlp",
    match=r"^rank 0: the whole model is in evaluation mode in step 1; in training mode when loaded\nrank 1: ",
)
class EvaluatesBeforeTraining(AccelerateDriver):
    """Looks at the loss before the first step, and forgets to go back to training mode."""

    def build(self, model: Module) -> None:
        super().build(model)
        self.model.eval()


@twin(
    "start",
    "ddp-fp32-w2-lora",
    match=r"^a new adapter changes outputs of the model by up to 0\.\d+ \(",
    also=OTHER_TRAINING,
)
class BeginsWithAnAdapterThatCounts(Torch):
    """Makes an adapter none of whose factors is zero, so that training does not start from the given model."""

    def build_model(self) -> Module:
        import torch

        model = super().build_model()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 0.02)
        return model


@twin(
    "start",
    "zero3-fp32-w2-model_mlp-loaded_zero_init",
    match=r"^parameter 'blocks\.0\.linear\.bias' and \d+ others: other values after build than were loaded\nmaster ",
    also=OTHER_TRAINING,
)
class ForgetsWhatItFilledIn(DeepSpeedDriver):
    """Fills a partitioned model without saying which rank changes it: what is gathered for reading is thrown away."""

    def own_model(self, given: Module, zero_config: Mapping[str, Any] | None = None) -> Module:
        import deepspeed

        with deepspeed.zero.Init(config_dict_or_path=zero_config):
            made = self.tiny.make()
        values = dict(given.named_parameters())
        for name, parameter in made.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                parameter.data.copy_(values[name].data)
        return made


@twin(
    "start",
    "zero3-fp32-w2-loaded_from_backbone",
    match=r"^parameter 'lm_head\.weight': other values after build than were loaded\nmaster ",
    also={**PARITY, **GRADIENTS},
)
class DrawsAnotherHead(DeepSpeedDriver):
    """Seeds its ranks before it reads the files, so that what they lack is not drawn as in one process."""

    def own_model(self, given: Module, zero_config: Mapping[str, Any] | None = None) -> Module:
        from unittest import mock

        with mock.patch("pytest_distcompat.ext.upstream.drivers._loaded.SEED", 7):
            return super().own_model(given, zero_config)


@twin(
    "start",
    "zero3-fp32-w2-model_mlp-loaded_zero_init",
    match=r"^parameter 'blocks\.0\.norm\.weight' and 1 others: other values after build than were loaded\nmaster ",
    also=OTHER_TRAINING,
)
class InitializesNormsOtherwise(DeepSpeedDriver):
    """Makes a model under ``deepspeed.zero.Init`` whose norms do not begin at 1."""

    def own_model(self, given: Module, zero_config: Mapping[str, Any] | None = None) -> Module:
        self.tiny = dataclasses.replace(self.tiny, make=self.make_anew)
        return super().own_model(given, zero_config)

    def make_anew(self) -> Module:
        """Return a partitioned model: while its norms are gathered, rank 0 initializes them."""
        import deepspeed
        import torch

        made = model_of(self.cell).make()
        norms = [parameter for name, parameter in made.named_parameters() if name.endswith("norm.weight")]
        with deepspeed.zero.GatheredParameters(norms, modifier_rank=0):
            for norm in norms:
                torch.nn.init.constant_(norm, 2.0)
        return made
