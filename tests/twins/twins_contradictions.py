"""A trainer that obeys one of two settings that contradict each other here, and the other there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.torch import TorchDriver

from .declare import GRADIENTS, twin

if TYPE_CHECKING:
    from torch.nn import Module

_MIXED = r"^a mix of two settings that contradict each other: {} holds with {}=[\d.]+ alone, {} with {}=[\d.]+ alone"
_TWO = ("TrainingArguments.max_grad_norm", "ds_config.gradient_clipping")


class ClipsAsSet(TorchDriver):
    """Clips to what the first of the two settings says."""

    def clip(self, factor: float = 1.0) -> float:
        from torch.nn.utils import clip_grad_norm_

        return float(clip_grad_norm_(self.model.parameters(), factor * (self.max_norm or 0.0)))

    def _clip(self) -> float:
        return self.clip()


@twin(
    "parity",
    f"ddp-fp32-w2-model_mlp-optimizer_sgd-set_{_TWO[0]}=0.25+{_TWO[1]}=0.5",
    match=_MIXED.format("parity", _TWO[0], "clipping", _TWO[1]),
    also={**GRADIENTS, "clipping": _MIXED.format("clipping", _TWO[1], "parity", _TWO[0])},
    sound=f"{__name__}:ClipsAsSet",
)
class ClippedTwice(ClipsAsSet):
    """What the optimizer is given is clipped to one norm, and what it applies to the other."""

    def build(self, model: Module) -> None:
        super().build(model)

        def again(*_: Any) -> None:
            self.clip()

        self.optimizer.register_step_pre_hook(again)

    def _clip(self) -> float:
        return self.clip(2.0)
