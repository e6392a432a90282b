"""DeepSpeed's pipelines (``pp`` under ZeRO): the engine runs the stages of a ``PipelineModule``.

The driver for DeepSpeed, by which its own API is tested, has them in cells (configurations under
test) such as ``zero1-fp32-w4-pp_2``. At collection ``unsupported_reason`` says which cells cannot
run. On each rank ``build`` makes a ``DeepSpeedPipeline`` of the model's layers, passes its
``module`` to ``deepspeed.initialize``, and gives it the engine (``engine``). Then ``step`` trains
on the rows of a batch, ``outputs`` evaluates, and ``whole_weights`` collects the weights for an
export.

A stage is a run of the model's layers. Rank r holds stage r if there is one pipeline; with 4 ranks
and 2 stages ranks 0 and 1 hold the first stage. The engine sends hidden states and their gradients
between stages. A batch passes the stages row by row, in micro-batches. A layer that two stages use
(``TiedLayerSpec``) is on both, and the engine adds up its gradients.

https://www.deepspeed.ai/tutorials/pipeline/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pytest_distcompat.parallel import pipeline_parallel
from pytest_distcompat.parallel.reasons import first_reason, untried_option_reason

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models import Batch, LayerByLayer

#: Names of the options that were tried beside DeepSpeed's pipelines. A cell with another option
#: cannot run.
BESIDE = frozenset(("model", "pp", "compile", "param_groups", "set"))


def unsupported_reason(cell: Cell, layers: LayerByLayer | None) -> str | None:
    """Return why DeepSpeed cannot train a model in stages as the cell asks; None if it can.

    Args:
        cell: The cell, with ``pp`` above 1.
        layers: The model's layers; None if it is no run of layers.
    """
    if layers is None:
        return f"the model {cell.option('model')} is no run of layers for a PipelineModule"
    reason = first_reason(
        (
            cell.strategy not in {"zero0", "zero1"},
            "DeepSpeed's PipelineEngine refuses ZeRO-2 and ZeRO-3",
        ),
        (
            cell.strategy == "zero0" and cell.precision == "bf16_upcast",
            (
                "at stage 0 in bfloat16 a PipelineEngine cannot load what it saved "
                "(docs/upstream.md)"
            ),
        ),
        (
            cell.pp > layers.count,
            f"the model {cell.option('model')} has {layers.count} layers, for {cell.pp} stages",
        ),
    )
    if reason is not None:
        return reason
    # An option of the cell that is not in ``BESIDE`` is a reason too.
    return untried_option_reason("a pipeline of DeepSpeed", cell, BESIDE)


class DeepSpeedPipeline:
    """A model in stages, and the engine that runs them.

    Attributes:
        layers: The functions for the model: ``make`` returns its layers in the order of the
            forward, ``loss`` is that of the last layer's outputs, ``inputs`` names the entry of a
            batch that the first layer gets.
        cell: The cell.
        specs: The layers of the whole model, as ``PipelineModule`` gets them.
        module: This rank's stage, DeepSpeed's ``PipelineModule``.
        engine: The ``PipelineEngine`` around it; None until the driver sets it.
    """

    def __init__(self, layers: LayerByLayer, cell: Cell, model: Module) -> None:
        from deepspeed.pipe import PipelineModule

        self.layers = layers
        self.cell = cell
        self.specs = layers.make(model)
        arguments = {
            "layers": self.specs,
            "num_stages": cell.pp,
            "loss_fn": layers.loss,
            # Layers by their number: the tiny model's differ little in size.
            "partition_method": "uniform",
        }
        self.module: Any = PipelineModule(**cell.with_settings("PipelineModule", arguments))
        self.engine: Any = None

    @property
    def group(self) -> Any:
        """Return the process group of the ranks with the stages of one copy of the model."""
        return self.engine.grid.get_pipe_parallel_group()

    def saved_name(self, key: str) -> str:
        """Return the name of a parameter whose key in the file of layer 3 is read as ``3.weight``.

        It is the same, but for a tied layer, which stages have as ``tied_modules.NAME``.
        """
        from deepspeed.pipe import TiedLayerSpec

        number, _, own = key.partition(".")
        if not number.isdigit():
            return key
        layer = self.specs[int(number)]
        if isinstance(layer, TiedLayerSpec):
            return f"tied_modules.{layer.key}.{own}"
        return key

    def step(self, rows: Sequence[Batch]) -> float:
        """Train on rows, each a batch of one, and return the mean of their losses on all ranks.

        The engine updates the parameters and steps the scheduler too.
        """
        return float(self.engine.train_batch(self._fed(rows)))

    def _fed(self, rows: Sequence[Batch]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield for each row what the first stage and the last stage take of it."""
        for row in rows:
            yield row[self.layers.inputs], row["labels"]

    def outputs(self, rows: Sequence[Batch]) -> torch.Tensor:
        """Return the outputs of the last stage for rows, on all ranks.

        Row by row: of several micro-batches ``eval_batch`` returns the outputs of the last one.
        """
        import torch
        from torch import distributed

        outputs = []
        for row in rows:
            _, output = self.engine.eval_batch(
                self._fed([row]), return_logits=True, num_micro_batches=1
            )
            message = [output]
            # Only the last stage has it.
            last = self.group.size() - 1
            distributed.broadcast_object_list(message, group=self.group, group_src=last)
            outputs.append(message[0])
        return torch.cat(outputs)

    def whole_weights(self) -> dict[str, Any]:
        """Return the weights of all stages, on the rank of the first one.

        Parameters are the float32 masters where the engine has them. On the other ranks it is their
        own state.
        """
        from deepspeed.utils import safe_get_full_fp32_param

        own: dict[str, Any] = dict(self.module.state_dict())
        for name, parameter in self.module.named_parameters():
            master = safe_get_full_fp32_param(parameter)
            if master is not None:
                own[name] = master.clone()
        return pipeline_parallel.gathered(own, self.group)
