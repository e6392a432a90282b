"""Random numbers of ranks on a mesh: alike where they must differ, and different where they must be the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_distcompat.drivers.torch import TorchDriver

from .declare import twin

if TYPE_CHECKING:
    from torch.nn import Module

TENSOR, SEQUENCE = "fsdp2-fp32-w2-model_dropout-tp_2", "fsdp2-fp32-w2-model_llama_dropout-tp_2-sp"
ALIKE = r"^ranks 0 and 1 draw the same random numbers in step 2; expected others, as they hold "


class Seeds(TorchDriver):
    """Each rank has the seed of a subclass."""

    def seed(self) -> int:
        """One for each rank."""
        return self.world.rank

    def seed_rank(self) -> None:
        import torch

        torch.manual_seed(1 + self.seed())


@twin(
    "randomness",
    TENSOR,
    "fsdp2-fp32-w4-model_llama_dropout-tp_2",
    match=r"^ranks 0 and 1 drop others of the same activations in step 2 \(.*dropout\); expected the same \(tp 2\)",
    also={
        "active": r"rank 1: \d+ parameters differ from rank 0's after three steps",
        "resume": r"other values after the load",
    },
)
class OwnSeedOfEachPart(Seeds):
    """Peers of tensor parallelism drop others of the activations that all of them have: each trains another model."""


@twin(
    "randomness",
    SEQUENCE,
    match=r"^ranks 0 and 1 drop the same of different activations in step 2 \(.*dropout\); expected others \(tp 2\)",
)
@twin("randomness", "fsdp2-fp32-w2-model_llama_dropout-cp_2", match=ALIKE + r"parts of the same sequences \(cp 2\)")
@twin("randomness", "fsdp2-fp32-w2-model_llama_dropout-pp_2", match=ALIKE + r"stages of the same pipeline \(pp 2\)")
class OneSeed(Seeds):
    """Each part of a sequence, or stage of a pipeline, drops the same."""

    def seed(self) -> int:
        return 0


@twin(
    "randomness",
    "fsdp2-fp32-w4-model_dropout-dp_replicate_2",
    match=r"^ranks 0 and 2 draw the same random numbers in step 2\nranks 1 and 3 draw the same",
)
class OneSeedOfAllReplicas(Seeds):
    """Replicas are seeded by the place of a rank in its own, and drop the same of other rows."""

    def seed(self) -> int:
        return self.world.rank % (self.world.size // 2)


@twin(
    "randomness",
    "fsdp2-fp32-w2-model_llama_dropout-pp_2",
    match=r"^rank 0 drops the same of different activations in step 2 \(model\.layers\.0\.mlp\.dropout\)",
)
class SeedsEachMicroBatch(TorchDriver):
    """Every micro-batch begins with the seed of its step."""

    number = 0

    def build(self, model: Module) -> None:
        import torch

        super().build(model)
        self.model.register_forward_pre_hook(lambda *_: torch.manual_seed(100 * self.number + self.world.rank) and None)

    def step(self, number: int) -> float:
        self.number = number
        return super().step(number)
