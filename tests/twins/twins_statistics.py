"""Statistics over the rows of all ranks. torch's SyncBatchNorm is for GPUs alone, so that here another one stands for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.drivers.torch import TorchDriver

from .declare import GRADIENTS, twin

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


class Gathered(TorchDriver):
    """Its SyncBatchNorm sums over the ranks by an all-reduce that has a gradient."""

    name: ClassVar[str] = "gathered"

    def build_model(self) -> Module:
        model = super().build_model()
        norm: Any = model.get_submodule("norm")
        model.norm = self.norm(norm.num_features)
        return model

    def norm(self, width: int) -> Module:
        """Make what stands for SyncBatchNorm; without a process group it is BatchNorm."""
        import torch
        from torch import distributed, nn
        from torch.distributed.nn.functional import all_reduce

        class Norm(nn.BatchNorm1d):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if not (self.training and distributed.is_initialized()):
                    return super().forward(x)
                own: Any = self
                rows = len(x) * distributed.get_world_size()
                total, squares = all_reduce(torch.stack([x.sum(0), x.square().sum(0)]))  # type: ignore[no-untyped-call]
                mean, var = total / rows, squares / rows - (total / rows).square()
                with torch.no_grad():
                    own.running_mean.lerp_(mean, own.momentum)
                    own.running_var.lerp_(var * rows / (rows - 1), own.momentum)
                    own.num_batches_tracked.add_(1)
                scaled: torch.Tensor = (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias
                return scaled

        return Norm(width)


@twin(
    "parity",
    "ddp-fp32-w2-model_syncbatchnorm",
    "fsdp2-fp32-w2-model_syncbatchnorm",
    match=r"^step 1: the loss is .* in the reference",
    also=GRADIENTS,
    sound=f"{__name__}:Gathered",
)
class OwnRows(Gathered):
    """Each rank normalizes by its own rows, as BatchNorm does where SyncBatchNorm was asked for."""

    def norm(self, width: int) -> Module:
        from torch.nn import BatchNorm1d

        return BatchNorm1d(width)
