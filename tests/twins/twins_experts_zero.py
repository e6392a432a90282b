"""Defects of expert parallelism by DeepSpeed's own layer: experts that are no others, gradients of other rows, files that lack some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver

from .declare import CLIPPING, GRADIENTS, PARITY, START, twin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch
    from torch.nn import Module

EXPERTS, WITH_REPLICAS = "zero1-fp32-w2-model_moe_deepspeed-ep_2", "zero2-fp32-w4-model_moe_deepspeed-ep_2"
#: Where the engine itself reduces gradients, and where it clips too little (docs/upstream/deepspeed_moe_fp32_norm.py).
WITHOUT_ZERO, REPLICAS_WITHOUT_ZERO = (f"zero0-fp32-{world}-model_moe_deepspeed-ep_2" for world in ("w2", "w4"))
WRONG_NORM = {**PARITY, **GRADIENTS, **CLIPPING}


class Experts(DeepSpeedDriver):
    """The DeepSpeed driver, with its layer and this rank's experts at hand."""

    @property
    def layer(self) -> Any:
        return self.model.module.moe.deepspeed_moe

    def expert_parameters(self) -> Iterator[Any]:
        for expert in self.layer.experts.deepspeed_experts:
            yield from expert.parameters()

    def take_those_of_rank_zero(self) -> None:
        from torch import distributed

        for parameter in self.expert_parameters():
            distributed.broadcast(parameter.detach(), 0)


@twin(
    "active",
    EXPERTS,
    match=r"^rank 0: experts are whole on each rank; expected 2 parts of expert parallelism, along a mesh dimension named 'ep'",
)
class ExpertsStayWhole(DeepSpeedDriver):
    """``ep_size`` got lost on its way to the layer, and every rank keeps all experts."""

    def build(self, model: Module) -> None:
        cell, self.cell = self.cell, self.cell.without("ep")
        super().build(model)
        self.cell = cell


@twin("parity", EXPERTS, WITH_REPLICAS, match=r"^step 1: the loss is ", also={**GRADIENTS, **CLIPPING, **START})
class ExpertsOfRankZero(Experts):
    """All ranks begin with the experts of rank 0, as where each makes its own from one seed."""

    def build(self, model: Module) -> None:
        super().build(model)
        self.take_those_of_rank_zero()


@twin(
    "resume",
    EXPERTS,
    match=r"^rank 1: parameter 'module\.moe\.\S+\.deepspeed_experts\.2\.bias' and 3 others: other values after the load",
    daily=True,
)
class ExpertsOfRankZeroLoaded(Experts):
    """All ranks have the experts of rank 0 after a load."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.take_those_of_rank_zero()


@twin(
    "active",
    REPLICAS_WITHOUT_ZERO,
    match=r"^rank 2: 4 parameters differ from rank 0's after three steps, first 'module\.moe\.",
    also=WRONG_NORM,
)
class ReplicasOfExpertsTrainApart(DeepSpeedDriver):
    """The gradients of experts are not reduced over the ranks that have the same ones."""

    def build(self, model: Module) -> None:
        super().build(model)
        self.model._reduce_expert_gradients = lambda *_: None


@twin(
    "gradients",
    EXPERTS,
    WITH_REPLICAS,
    match=r"^step 1: .*: the gradient of moe\.deepspeed_moe\.experts\.",
    also={**PARITY, **CLIPPING},
)
class ExpertsReducedOverAllRanks(Experts):
    """The gradients of unlike experts are summed, like those of all else."""

    def build(self, model: Module) -> None:
        from torch import distributed

        super().build(model)

        def over_all(gradient: torch.Tensor) -> torch.Tensor:
            total = gradient.clone()
            distributed.all_reduce(total)
            return total

        for parameter in self.expert_parameters():
            parameter.register_hook(over_all)


@twin(
    "gradients",
    WITH_REPLICAS,
    match=r"^step 1: .*: the gradient of moe\.deepspeed_moe\.experts\.\S+ .*is .* times .*\(= the size of ep",
    also={**PARITY, **CLIPPING},
)
class ExpertsTimesEpSize(Experts):
    """Sums over rows of several ranks are taken for a mean: https://github.com/deepspeedai/DeepSpeed/issues/6545."""

    def build(self, model: Module) -> None:
        super().build(model)
        for parameter in self.expert_parameters():
            parameter.register_hook(lambda gradient: gradient * self.cell.ep)


@twin(
    "clipping",
    WITH_REPLICAS,
    match=r"^step 1: .*the gradients that the optimizer gets have norm 1\.\d+; 0\.99\d* in the reference",
    also={**PARITY, **GRADIENTS},
)
class NormWithoutExperts(DeepSpeedDriver):
    """Gradients are clipped by the norm of all but the experts: https://github.com/deepspeedai/DeepSpeed/pull/8613."""

    def build(self, model: Module) -> None:
        super().build(model)

        experts = self.optimizer.is_moe_param_group

        def without(norms: Any) -> None:
            norms[:] = [0 * norm if moe else norm for norm, moe in zip(norms, experts, strict=True)]

        self.optimizer._average_expert_grad_norms = without


@twin(
    "gradients",
    EXPERTS,
    match=r"^step 1: .*: the gradient of moe\.deepspeed_moe\.gate\.wg\.weight is zero or missing",
    also={**PARITY, **CLIPPING},
)
class GateOutsideTheGraph(Experts):
    """The loss is right, and the gate does not learn."""

    def build(self, model: Module) -> None:
        super().build(model)

        def detach(_module: Module, _inputs: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(part.detach() if hasattr(part, "detach") else part for part in parts)

        self.layer.gate.register_forward_hook(detach)


@twin("names", EXPERTS, match=r"^4 of 17 parameters are in no saved file, first 'moe\.\S+\.deepspeed_experts\.2\.bias'")
class ExpertsOfRankZeroSaved(DeepSpeedDriver):
    """A checkpoint has the experts of rank 0 alone."""

    def save(self, directory: Path) -> None:
        from torch import distributed

        super().save(directory)
        distributed.barrier()
        for path in directory.glob(f"*/layer_0_expert_{2 + self.world.rank}_*") if self.world.rank < 2 else ():
            path.unlink()


@twin(
    "resume",
    WITHOUT_ZERO,
    match=r"^rank 1: parameter 'module\.moe\.\S+\.deepspeed_experts\.2\.bias' and 3 others: other values after the load",
    also=WRONG_NORM,
)
class ExpertsOfRankZeroInAllFiles(DeepSpeedDriver):
    """The files of all experts hold those of rank 0, each under the name of its own."""

    def save(self, directory: Path) -> None:
        import torch
        from torch import distributed

        super().save(directory)
        distributed.barrier()
        for number in (0, 1) if self.world.rank == 0 else ():
            source, *_ = directory.glob(f"*/layer_0_expert_{number}_*")
            state = torch.load(source)
            names = {name: name.replace(f"_experts.{number}.", f"_experts.{number + 2}.") for name in state}
            file = source.with_name(source.name.replace(f"expert_{number}", f"expert_{number + 2}"))
            torch.save({names[name]: tensor for name, tensor in state.items()}, file)
        distributed.barrier()
