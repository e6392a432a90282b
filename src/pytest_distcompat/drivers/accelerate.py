"""accelerate: all six strategies by ``Accelerator.prepare``, checkpoints by ``save_state`` and ``load_state``.

https://huggingface.co/docs/accelerate/usage_guides/fsdp, https://huggingface.co/docs/accelerate/usage_guides/deepspeed
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.drivers._tiny import TinyDriver
from pytest_distcompat.strategies import STRATEGIES

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.cell import Cell


class AccelerateDriver(TinyDriver):
    """The training loop of accelerate's own documentation."""

    name: ClassVar[str] = "accelerate"
    preload: ClassVar[tuple[str, ...]] = (
        "accelerate",
        "accelerate.utils.fsdp_utils",
        "deepspeed",
        # Every ZeRO engine imports it, and torch._dynamo with it: seconds a life.
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
        "safetensors.torch",
    )
    options: ClassVar[tuple[str, ...]] = ("model", "state_dict", "activation_checkpointing")
    order: ClassVar[int] = 1

    accelerator: Any = None

    @classmethod
    def unable(cls, cell: Cell, device: str = "cpu") -> str:
        """The strategies without an accelerate dialect, and what crashes the interpreter on this device."""
        if STRATEGIES.get(cell.strategy).accelerate is None:
            return f"accelerate has no {cell.strategy}"
        if device == "cpu" and cell.strategy == "fsdp1" and cell.option("state_dict") == "full":
            return (
                "accelerate gathers FSDP1's full state dict with offload to the CPU, which on CPU ranks is a segmentation "
                "fault in torch (https://github.com/pytorch/pytorch/issues/188989)"
            )
        return super().unable(cell, device)

    def build(self, model: Module) -> None:
        """One Accelerator, then model, optimizer and scheduler together through ``prepare``."""
        from accelerate import Accelerator

        assert self.strategy.accelerate is not None
        settings = dict(self.strategy.accelerate(self.precision, self.cell))
        # DeepSpeed has its low-precision mode in its own JSON, under the name of mixed precision.
        bf16 = self.precision.mixed or (self.strategy.zero_stage is not None and self.precision.compute == "bfloat16")
        settings["mixed_precision"] = "bf16" if bf16 else "no"
        if self.world.device == "cpu":
            settings |= on_cpu(settings)
        self.accelerator = Accelerator(**settings)
        optimizer = self.make_optimizer(model)
        scheduler = self.make_scheduler(optimizer)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def step(self, number: int) -> float:
        """Forward, backward, optimizer and scheduler step, as accelerate's documentation writes them."""
        loss = self.tiny.loss(self.model, self.batch(number))
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def save(self, directory: Path) -> None:
        """``save_state``."""
        self.accelerator.save_state(str(directory))

    def load(self, directory: Path) -> None:
        """``load_state``."""
        self.accelerator.load_state(str(directory))

    def trainer_world_size(self) -> int | None:
        """What accelerate believes."""
        return int(self.accelerator.num_processes)


#: The releases of accelerate on which ``on_cpu`` was tried: from the first, to before the second.
TRIED = ("1.6", "2")


def check_version(version: str) -> None:
    """Raise RuntimeError for an accelerate before the first that has FSDP2; warn of a major version nobody tried."""
    import warnings

    from packaging.version import Version

    first, after = TRIED
    if Version(version) < Version(first):
        raise RuntimeError(f"accelerate {version} cannot run FSDP2 on CPU ranks; {first} or newer is needed")
    if Version(version) >= Version(after):
        told = f"accelerate {version}: that it runs on CPU what it is asked for was tried below {after} only"
        warnings.warn(f"{told}; believe the check 'active'", stacklevel=2)


def on_cpu(settings: dict[str, Any]) -> dict[str, Any]:
    """What makes ``Accelerator(**settings)`` really run on CPU what the settings ask for.

    Left alone, accelerate turns an FSDP plugin with ``cpu=True`` into plain DDP, one without it into a bare model with
    no gradient sync at all, and a DeepSpeed plugin with ``cpu=True`` into plain DDP, each without a word: it takes the
    FSDP branch for accelerators only and excludes ``cpu=True`` from the DeepSpeed branch (``AcceleratorState.__init__``).

    So: DDP asks for ``cpu=True``; DeepSpeed for gloo by a kwargs handler; for FSDP the shared state is told beforehand
    that this is a multi-device run on device type "cpu". ``ACCELERATE_TORCH_DEVICE`` and ``PartialState`` are public;
    setting ``distributed_type`` on it is not documented. Seen to work with accelerate 1.6, 1.7, 1.10 and 1.12 to 1.15; the
    version is checked, and the ``active`` check fails when it stops working, whatever the version.

    Raises RuntimeError for a version that cannot do it.
    """
    import os
    from datetime import timedelta

    import accelerate
    from accelerate import DistributedType, InitProcessGroupKwargs, PartialState

    check_version(accelerate.__version__)
    if "fsdp_plugin" in settings:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        PartialState(cpu=True)
        PartialState().distributed_type = DistributedType.MULTI_GPU
        return {}
    if "deepspeed_plugin" in settings:
        return {"kwargs_handlers": [InitProcessGroupKwargs(backend="gloo", timeout=timedelta(minutes=10))]}
    return {"cpu": True}
