"""Defects of DeepSpeed's pipelines: tied layers that go apart, stages that are none, rows that are lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver

from .declare import GRADIENTS, PARITY, twin

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.parallel.deepspeed_pipeline import DeepSpeedPipeline

TIED = "zero1-fp32-w2-model_layers_tied-pp_2"


@twin(
    "active",
    TIED,
    match=r"^rank 1: 1 parameters differ from rank 0's after three steps, first 'tied_modules\.ends\.weight' "
    r"\(stages 0 and 1 have them, and train them apart\)",
    also={**PARITY, **GRADIENTS},
)
class TiedApart(DeepSpeedDriver):
    """Each stage updates a tied layer by the gradient of its own use of it."""

    def build(self, model: Module) -> None:
        super().build(model)
        self.model.module.get_tied_weights_and_groups = list


@twin(
    "active",
    "zero1-fp32-w2-model_layers-pp_2",
    match=r"^ranks? .*: the model is on 1 rank of a pipeline; expected the layers of some of the stages on each of 2",
)
class OneStage(DeepSpeedDriver):
    """The number of stages does not reach the module, so that each rank has all layers."""

    def build(self, model: Module) -> None:
        import deepspeed.pipe

        def whole(*, num_stages: int, **arguments: Any) -> Any:
            assert num_stages == 2
            return module_class(num_stages=1, **arguments)

        module_class = deepspeed.pipe.PipelineModule
        with mock.patch.object(deepspeed.pipe, "PipelineModule", whole):
            super().build(model)


@twin(
    "parity",
    "zero1-fp32-w2-model_layers-pp_2",
    match=r"^step 1: the loss is [\d.]+; [\d.]+ in the reference",
    also=GRADIENTS,
)
class FirstRowAlone(DeepSpeedDriver):
    """The engine is fed the first row of a batch for each of its micro-batches."""

    def _pipelined(self, number: int, pipeline: DeepSpeedPipeline) -> float:
        step = pipeline.step
        pipeline.step = lambda rows: step([rows[0]] * len(rows))  # type: ignore[method-assign]
        try:
            return super()._pipelined(number, pipeline)
        finally:
            pipeline.step = step  # type: ignore[method-assign]
