"""Defects of pipeline parallelism: a stage that is whole, does not train, or goes by itself; micro-batches counted twice."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.ext.upstream.drivers import _options
from pytest_distcompat.strategies._base import MAX_NORM

from .declare import CLIPPING, GRADIENTS, PARITY, Torch, twin

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.strategies import WrapSpec

ALONE, WITH_SHARDS, WITH_COPIES = "fsdp2-fp32-w2-pp_2", "fsdp2-fp32-w4-pp_2", "ddp-fp32-w4-pp_2"
WITH_PARTS = "fsdp2-fp32-w4-tp_2-pp_2"
INTERLEAVED = "fsdp2-fp32-w4-pp_2-pp_schedule_Interleaved1F1B"


@twin(
    "gradients",
    "fsdp2-fp32-w2-grad_accum_2-pp_2",
    match=r"^step 1: .*: the gradient of ",
    also={**PARITY, **CLIPPING},
)
class ScaledInEachCall(Torch):
    """Gradients that add up over calls are divided in each: https://github.com/pytorch/torchtitan/issues/1733."""

    def _pipelined(self, number: int) -> float:
        batches = [batch for batch, _ in self.batches(number)]
        self.fed = [
            {name: tensor[row : row + 1] for name, tensor in batch.items()} for batch in batches for row in (0, 1)
        ]
        total = 0.0
        for batch in batches:
            self.pipeline.schedule(2, self.accumulate).scale_grads = True
            total += self.pipeline.step(batch, self.accumulate) / 2
        self.update()
        return total


@twin(
    "parity",
    ALONE,
    match=r"^step 1: rank 0: the gradient norm is 0\.84\d+; 1\.68\d+ in the reference",
    also={**GRADIENTS, **CLIPPING},
)
class ScaledOnceMore(Torch):
    """torch's ``scale_grads`` divides by the number of micro-batches what the loss was divided by already."""

    def _pipelined(self, number: int) -> float:
        self.pipeline.schedule(2, 2).scale_grads = True
        return super()._pipelined(number)


@twin(
    "parity",
    ALONE,
    WITH_SHARDS,
    WITH_PARTS,
    match=r"^step 1: rank 0: the gradient norm is ",
    also={**CLIPPING, **GRADIENTS},
)
class ClippedByTheStage(Torch):
    """Each stage clips by the norm of its own gradients."""

    def _clip(self) -> float:
        return _options.clip_on_meshes(self.model.parameters(), MAX_NORM)


@twin(
    "active",
    WITH_PARTS,
    match=r"^rank 2: layers are whole on each rank; expected 2 parts of tensor parallelism",
    # Norms of stages that are cut differently have no common groups of ranks.
    also=CLIPPING,
)
class LastStageIsNotCut(Torch):
    """The plan of tensor parallelism is applied to the first stage alone."""

    @property
    def wrap_spec(self) -> WrapSpec:
        sound = super().wrap_spec
        return sound if self.pipeline is None or self.pipeline.first else dataclasses.replace(sound, tp_plan={})


@twin(
    "units",
    INTERLEAVED,
    match=r"^rank 0: FSDP's units are nothing; expected 'model\.layers\.1', and none inside a block",
    also={"active": r"^rank 0: LlamaForCausalLM runs as a bare model; expected FSDP2"},
)
class SecondStageIsOneUnit(Torch):
    """Of two stages on a rank the policy names the blocks of the first alone."""

    later: bool = False

    @property
    def wrap_spec(self) -> WrapSpec:
        sound = super().wrap_spec
        return dataclasses.replace(sound, blocks=()) if self.later else sound

    def _wrap(self, model: Module, device: Any) -> Module:
        wrapped = super()._wrap(model, device)
        self.later = True
        return wrapped


@twin(
    "names",
    ALONE,
    match=r"^\d+ of \d+ parameters are in no saved file, first .*; rank 0 \(stage 0\) alone holds them",
)
class OnlyTheLastStageIsSaved(Torch):
    """The checkpoint is written by the last stage alone."""

    def save(self, directory: Path) -> None:
        import torch

        if self.pipeline.last:
            torch.save(self._state(), directory / "checkpoint.pt")


@twin(
    "data",
    ALONE,
    match=r"^ranks 0 and 1 are fed different batches in step 1; expected the same, as they hold stages of the same pipeline",
    also={**PARITY, **GRADIENTS},
)
class LossOfOtherRows(Torch):
    """The last stage takes its labels from a sampler that counts all ranks."""

    def batches(self, number: int) -> Any:
        for index, (_, last) in zip(self.micros(number), super().batches(number), strict=True):
            yield self.batch_of(index, self.world.rank), last


@twin(
    "optimizer",
    ALONE,
    match=r"trainable parameter 'lm_head\.weight' did not move in three steps, on rank 1 \(stage 1\), where it is",
    also={
        **PARITY,
        **CLIPPING,
        **GRADIENTS,
        "names": r"^the optimizer of no rank keeps state for 'lm_head\.weight'",
        "dtypes": r"^rank 1: AdamW is given gradients in nothing",
        "memory": r"^rank 1 together keep 0 elements of 'exp_avg'; \d+ elements are trained",
        # torch makes the state when it saves it.
        "observers": r"^rank 1: optimizer state .*: new after the save",
    },
    daily=True,
)
class LastStageDoesNotTrain(Torch):
    """The last stage loses its gradients before the optimizer steps."""

    def _clip(self) -> float:
        norm = super()._clip()
        for parameter in self.model.parameters() if self.pipeline.last else ():
            parameter.grad = None
        return norm


@twin(
    "active",
    WITH_COPIES,
    match=r"^rank 2: 1 parameters differ from rank 0's .*train them apart",
    also={
        "optimizer": r"^rank 2: trainable parameter .*embed_tokens\.weight' is not in the optimizer",
        "memory": r"^ranks 2, 3 together keep \d+ elements",
        "start": r"^rank 2: parameter 'model\.embed_tokens\.weight': frozen after build; trainable when loaded",
    },
)
class KeptOnTwoStages(Torch):
    """The last stage has a copy of the embeddings, which nothing trains together with those of the first."""

    def _wrap(self, model: Module, device: Any) -> Module:
        if self.pipeline.last:
            full_model: Any = self.build_model()
            model.set_submodule("model.embed_tokens", copy.deepcopy(full_model.model.embed_tokens))
            model.get_submodule("model.embed_tokens").requires_grad_(requires_grad=False)
        return super()._wrap(model, device)


@twin(
    "names",
    ALONE,
    match=r"^rank 0: parameter 'model\.norm\.weight' of the unwrapped model has no live counterpart on any stage",
    also={**PARITY, **GRADIENTS, **CLIPPING},
    daily=True,
)
class NormOnNoStage(Torch):
    """No stage keeps the last norm."""

    def _wrap(self, model: Module, device: Any) -> Module:
        from pytest_distcompat.parallel.placeholder import Elsewhere

        model.set_submodule("model.norm", Elsewhere())
        return super()._wrap(model, device)
