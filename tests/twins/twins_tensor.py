"""Defects of tensor parallelism: no plan, a collective too few, a factor too much, peers that are no peers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
from pytest_distcompat.parallel import context_parallel, expert_parallel, tensor_parallel

from .declare import CLIPPING, GRADIENTS, PARITY, START, Torch, twin
from .twins_deepspeed import DeepSpeed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models import Batch
    from pytest_distcompat.precisions import Precision
    from pytest_distcompat.strategies import WrapSpec

ALONE, WITH_SHARDS = "fsdp2-fp32-w2-tp_2", "fsdp2-fp32-w4-tp_2"
DRIFT = {"active": r"rank 1: \d+ parameters differ from rank 0's after three steps"}


@twin(
    "active",
    ALONE,
    WITH_SHARDS,
    match=r"^rank 0: layers are whole on each rank; expected 2 parts of tensor parallelism",
)
class NoPlanFits(Torch):
    """A plan whose names are another model's: torch passes over them, and every rank keeps every layer whole."""

    @property
    def wrap_spec(self) -> WrapSpec:
        sound = super().wrap_spec
        return dataclasses.replace(
            sound, tp_plan={f"transformer.{name}": style for name, style in sound.tp_plan.items()}
        )


@twin(
    "active",
    "fsdp2-fp32-w4-activation_checkpointing-tp_2",
    match=r"^rank 0: of the blocks 'model\.layers\.0', 'model\.layers\.1' no layer is cut; expected 2 parts of tensor parallelism",
)
class RecomputedBeforeItIsCut(Torch):
    """Blocks are wrapped before the plan is applied, whose names fit embeddings and head alone: torch warns and goes on."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        self.given.prepare(model)
        self.given = dataclasses.replace(self.given, prepare=lambda _: None)
        return super().wrap(model, precision, cell, device)


@twin(
    "active",
    f"{ALONE}-sp",
    f"{WITH_SHARDS}-sp",
    match=r"^rank 0: no sum of ranks 0, 1 was scattered in a step \(collectives of activations: .*all_reduce.*\); expected sequence",
)
class SequenceStaysWhole(Torch):
    """Sequence parallelism is asked for, and every rank of tensor parallelism computes norms on the whole sequence."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        return super().wrap(model, precision, cell.without("sp"), device)


@twin("active", ALONE, match=DRIFT["active"], also={"resume": r"other values after the load"})
class NormDrifts(Torch):
    """One rank changes a norm that all ranks of tensor parallelism hold, by too little for any loss."""

    def update(self) -> None:
        import torch

        super().update()
        if self.world.rank % self.cell.tp:
            with torch.no_grad():
                self.model.model.norm.weight.mul_(1 + 1e-6)


@twin("parity", ALONE, WITH_SHARDS, match=r"^step 1: the loss is ", also={**DRIFT, **GRADIENTS})
class NotReduced(Torch):
    """A plan that leaves the sums of the attention's outputs on the ranks that made them."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch.distributed.tensor import Partial
        from torch.distributed.tensor.parallel import RowwiseParallel

        sound = tensor_parallel._style

        def style(name: str, *, sequence: bool) -> Any:
            # What is left partial is taken for whole by the model's own code.
            return RowwiseParallel(output_layouts=Partial()) if name == "rowwise" else sound(name, sequence=sequence)

        tensor_parallel._style = style
        try:
            return super().wrap(model, precision, cell, device)
        finally:
            tensor_parallel._style = sound


@twin("parity", ALONE, match=r"^step 1: the loss is 9\.\d+; 4\.\d+ in the reference")
class LossTimesTp(Torch):
    """The loss is multiplied by the size of tp, as transformers did: https://github.com/huggingface/transformers/issues/45994."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        sound, factor = self.tiny.loss, self.cell.tp
        self.tiny = dataclasses.replace(self.tiny, loss=lambda model, batch: sound(model, batch) * factor)


@twin(
    "gradients",
    WITH_SHARDS,
    match=r"^step 1: rank 0: the gradient of model\.layers.*norm.* is 0\.5 times the reference's \(= 1 / the size of tp",
    also=PARITY,
)
class GradientsTimesTp(Torch):
    """What tensor parallelism cuts gets its gradient times the size of tp; clipped, all else is too small."""

    def _clip(self) -> float:
        for parameter in self.model.parameters():
            if "tp" in parameter.device_mesh.mesh_dim_names:
                parameter.grad.mul_(self.cell.tp)
        return super()._clip()


@twin(
    "data",
    ALONE,
    match=r"^ranks 0 and 1 are fed different batches in step 1; expected the same",
    also={**PARITY, **GRADIENTS},
)
class PeersFedOtherRows(Torch):
    """Each rank takes its own rows, as under data parallelism: sums mix them, so that ranks stay equal all the same."""

    def batches(self, number: int) -> Iterator[tuple[Batch, bool]]:
        for index, (_, last) in zip(self.micros(number), super().batches(number), strict=True):
            yield self.batch_of(index, self.world.rank), last


SEQUENCE, SEQUENCE_WITH_SHARDS = "fsdp2-fp32-w2-cp_2", "fsdp2-fp32-w4-cp_2"


@twin(
    "active",
    SEQUENCE_WITH_SHARDS,
    match=r"^rank 0: ranks 0, 1 exchanged nothing among themselves in a step; expected context parallelism \(cp 2\)",
    also={**PARITY, **GRADIENTS},
)
@twin("parity", SEQUENCE, "fsdp2-fp32-w4-tp_2-cp_2", match=r"^step 1: the loss is ", also=GRADIENTS)
class AttentionStaysLocal(Torch):
    """Context parallelism without its ring: each rank attends to its own part of the sequence alone."""

    def step(self, number: int) -> float:
        sound: Any = context_parallel.attending
        library: Any = context_parallel
        library.attending = lambda *_: contextlib.nullcontext()
        try:
            return super().step(number)
        finally:
            context_parallel.attending = sound


@twin("parity", SEQUENCE, SEQUENCE_WITH_SHARDS, match=r"^step 1: the loss is 9\.\d+; 4\.\d+ in the reference")
class LossTimesCp(Torch):
    """The loss is multiplied by the size of cp once more."""

    def micro_loss(self, batch: Batch) -> torch.Tensor:
        return super().micro_loss(batch) * self.cell.cp


@twin(
    "data",
    SEQUENCE_WITH_SHARDS,
    match=r"^ranks 0 and 1 are fed the same batch in step 1; expected another part of the sequence on each \(cp 2\)",
    also={"active": r"^rank 0: ranks 0, 1 exchanged nothing among themselves"},
)
class SequenceIsNotCut(Torch):
    """Context parallelism is asked for, and each of its ranks computes on the whole sequence."""

    def build(self, model: Module) -> None:
        super().build(model)
        self.context = None


@twin(
    "parity",
    SEQUENCE,
    match=r"^step 1: the loss is .* in the reference .*; with cp 2 ranks 0, 1 must be fed parts of the same rows",
    also={**GRADIENTS, **CLIPPING},
)
class SequencesOfItsOwn(Torch):
    """Each rank of a sequence takes its part of rows of its own: a sampler that counts all ranks."""

    def batches(self, number: int) -> Iterator[tuple[Batch, bool]]:
        for index, (_, last) in zip(self.micros(number), super().batches(number), strict=True):
            yield self.batch_of(index, self.world.rank), last


EXPERTS, EXPERTS_WITH_SHARDS = "fsdp2-fp32-w2-model_moe_fused-ep_2", "fsdp2-fp32-w4-model_moe_fused-ep_2"


@twin(
    "active",
    EXPERTS_WITH_SHARDS,
    match=r"^rank 0: experts are whole on each rank; expected 2 parts of expert parallelism, along a mesh dimension named 'ep'",
)
class ExpertsStayWhole(Torch):
    """Expert parallelism is asked for, and every rank keeps a shard of all experts, as without."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        return super().wrap(model, precision, cell.without("ep"), device)


@twin("parity", EXPERTS, EXPERTS_WITH_SHARDS, match=r"^step 1: the loss is ", also={**GRADIENTS, **CLIPPING, **START})
class ExpertsOfRankZero(Torch):
    """All ranks get the experts of rank 0: https://github.com/huggingface/transformers/issues/45662."""

    def build(self, model: Module) -> None:
        from torch import distributed

        super().build(model)
        for parameter in self.model.experts.parameters():
            distributed.broadcast(parameter.to_local().detach(), 0)


@twin(
    "gradients",
    EXPERTS,
    match=r"^step 1: (all ranks|rank 0).*: the gradient of block.* is zero or missing",
    also={**PARITY, **CLIPPING},
)
class OnlyExpertsLearn(Torch):
    """All but the experts lose their gradients: https://github.com/huggingface/transformers/issues/48205."""

    def _clip(self) -> float:
        for name, parameter in self.model.named_parameters():
            if not name.startswith("experts"):
                parameter.grad = None
        return super()._clip()


@twin(
    "gradients",
    EXPERTS,
    match=r"^step 1: .*: the gradient of router\.weight is zero or missing",
    also={**PARITY, **CLIPPING},
)
class RouterOutsideTheGraph(Torch):
    """The loss is right, and the router does not learn: https://github.com/huggingface/transformers/issues/48687."""

    def build(self, model: Module) -> None:
        super().build(model)
        self.model.router.register_forward_hook(lambda _module, _inputs, scores: scores.detach())


@twin(
    "gradients",
    EXPERTS_WITH_SHARDS,
    match=r"^step 1: .*: the gradient of experts\..* is .* times .*the size of ep",
    also={**PARITY, **CLIPPING},
)
class ExpertsTimesEp(Torch):
    """The sums over the rows of several ranks are taken for a mean: https://github.com/pytorch/pytorch/issues/160285."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        wrapped: Any = super().wrap(model, precision, cell, device)
        wrapped.experts.set_gradient_divide_factor(cell.dp_size / cell.ep)
        module: Module = wrapped
        return module


CUT_EXPERTS = "fsdp2-fp32-w4-model_moe_fused-tp_2-ep_2"


@twin(
    "gradients",
    CUT_EXPERTS,
    match=r"^step 1: .*: the gradient of .*(block|inlet).* in the reference",
    also={**PARITY, **CLIPPING},
)
class GradientsOfOwnColumnsAlone(Torch):
    """Rows learn from the columns of an expert that their rank computes alone: the sum over tp is forgotten."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        sound = expert_parallel.Exchange

        class Exchange(expert_parallel.Exchange):
            def _whole(self, rows: torch.Tensor) -> torch.Tensor:
                return rows

        expert_parallel.Exchange = Exchange  # type: ignore[misc]
        try:
            return super().wrap(model, precision, cell, device)
        finally:
            expert_parallel.Exchange = sound  # type: ignore[misc]


#: Every rank has whole gradients and state, of the rows of its peers.
PEERS_OF_NOTHING = {
    "observers": "consolidated_16bit_state_dict is only applicable",
    "optimizer": r"expected each one 2 times",
    "memory": r"^all ranks together keep",
}
AUTOTP, AUTOTP_RECOMPUTED = "zero1-fp32-w4-tp_2", "zero2-fp32-w2-activation_checkpointing-tp_2"


@twin(
    "active", AUTOTP, match=r"^rank 0: layers are whole on each rank; expected 2 parts of tensor", also=PEERS_OF_NOTHING
)
class NoAutoTp(DeepSpeed):
    """``tensor_parallel`` got lost on its way into the JSON: all ranks are data parallel, and hold everything."""

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        return super().settings(precision, cell.without("tp"))


@twin("parity", AUTOTP_RECOMPUTED, match=r"^step 1: the loss is ", also={**DRIFT, **GRADIENTS, **CLIPPING}, daily=True)
class CollectivesOfRecomputedLayersDropped(DeepSpeedDriver):
    """Sums of recomputed layers stay on the ranks that made them: https://github.com/deepspeedai/DeepSpeed/issues/8357."""

    def build(self, model: Module) -> None:
        super().build(model)
        for module in self.wrap_spec.block_modules(self.model):
            for layer in module.modules():
                layer.mp_group = None  # type: ignore[assignment]


@twin(
    "data",
    AUTOTP,
    match=r"^ranks 0 and 1 are fed different batches in step 2; expected the same",
    also={**DRIFT, **PARITY, **GRADIENTS, **CLIPPING, "resume": "loss 1 after the load is"},
)
class PeersFedOtherRowsLater(DeepSpeedDriver):
    """Peers are fed the same rows in the first step of a process alone, the one in which DeepSpeed looks."""

    looked = False

    def batches(self, number: int) -> Iterator[tuple[Batch, bool]]:
        for index, (batch, last) in zip(self.micros(number), super().batches(number), strict=True):
            yield self.batch_of(index, self.world.rank) if self.looked else batch, last
        self.looked = True


@twin("resume", AUTOTP, match=r"^rank 1: parameter 'module\.lm_head\.weight' and \d+ others: other values after")
class PartsOfTheFirstRankLoaded(DeepSpeedDriver):
    """Each rank of tensor parallelism loads the parts of the first one."""

    def load(self, directory: Path) -> None:
        self.model.checkpoint_mp_rank = 0
        super().load(directory)


ULYSSES = "zero2-fp32-w4-cp_2"


@twin("parity", ULYSSES, match=r"^step 1: .*the gradient norm is 2\.5\d*; 1\.2\d* in the reference")
class GradientsTimesSequenceParallelSize(DeepSpeedDriver):
    """The tutorial's loss, as it stands, under ZeRO-2: https://github.com/deepspeedai/DeepSpeed/issues/5248."""

    backward_divisor = 1


@twin("parity", ULYSSES, match=r"^step 1: .*the loss is .* in the reference", also={**GRADIENTS, **CLIPPING})
class MeansOfPartsAveraged(DeepSpeedDriver):
    """Parts of a sequence count alike, however many tokens of each are trained on."""

    def micro_loss(self, batch: Batch) -> Any:
        from deepspeed.utils import groups
        from torch import distributed
        from torch.nn import functional

        sound = functional.cross_entropy

        def mean(logits: Any, labels: Any, **_: Any) -> Any:
            count = (labels != -100).sum()
            total = count.clone()
            distributed.all_reduce(total, group=groups._get_sequence_parallel_group())
            return sound(logits, labels) * total / self.cell.cp if count else logits.sum() * 0

        library: Any = functional
        library.cross_entropy = mean
        try:
            return super().micro_loss(batch)
        finally:
            library.cross_entropy = sound
