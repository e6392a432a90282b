"""Driver for accelerate: all strategies by ``Accelerator.prepare``, checkpoints by ``save_state`` and ``load_state``.

https://huggingface.co/docs/accelerate/usage_guides/fsdp, https://huggingface.co/docs/accelerate/usage_guides/deepspeed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.drivers import _options, _preload
from pytest_distcompat.drivers._tiny import TinyDriver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.settings.fields import Source
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.strategies._base import MAX_NORM

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models._base import Batch


class AccelerateDriver(TinyDriver):
    """Training loop as in accelerate's documentation."""

    name: ClassVar[str] = "accelerate"
    preload: ClassVar[tuple[str, ...]] = _preload.ACCELERATE
    options: ClassVar[tuple[str, ...]] = (
        "model",
        "state_dict",
        "compile",
        "activation_checkpointing",
        "grad_accum",
        "cpu_offload",
        "reshard_after_forward",
        "dp_replicate",
        "use_orig_params",
        "cpu_ram_efficient_loading",
        "wrap_policy",
        "ignored_modules",
        "frozen",
        "lora",
        "param_groups",
        "fp8_backend",
        "float32_norms",
        "grad_accum_dtype",
        "reduce_dtype",
        "conflict",
        "set",
    )
    sources: ClassVar[tuple[Source, ...]] = (
        Source("FullyShardedDataParallelPlugin", "accelerate.FullyShardedDataParallelPlugin", ("fsdp1", "fsdp2")),
        Source("DeepSpeedPlugin", "accelerate.DeepSpeedPlugin", ("zero2", "zero3")),
        Source("Accelerator", "accelerate.Accelerator", ("ddp", "fsdp2", "zero2")),
        Source("GradientAccumulationPlugin", "accelerate.utils.GradientAccumulationPlugin", ("ddp", "fsdp2", "zero2")),
        Source("DataLoaderConfiguration", "accelerate.DataLoaderConfiguration", ("ddp", "fsdp2", "zero2")),
        Source("TorchDynamoPlugin", "accelerate.utils.TorchDynamoPlugin", ("ddp", "fsdp2")),
        Source("", "accelerate.utils.dataclasses.KwargsHandler", ("ddp", "fsdp2"), "subclasses"),
        Source("ds_config", "deepspeed.runtime.config.DeepSpeedConfig", ("zero2",), "keys"),
        Source("AdamW", "torch.optim.AdamW", ("ddp", "fsdp2", "zero2")),
    )
    libraries: ClassVar[tuple[str, ...]] = ("accelerate", "torch", "deepspeed")
    reshards: ClassVar[tuple[str, ...]] = ("ddp", "fsdp1", "fsdp2")
    portable: ClassVar[Mapping[str, str]] = {"fsdp1": "fsdp2", "zero1": "fsdp2", "zero2": "fsdp2", "zero3": "fsdp2"}
    order: ClassVar[int] = 1

    accelerator: Any = None
    _stream: Iterator[Batch] | None = None

    @classmethod
    def unsupported_reason(cls, cell: Cell, device: str = "cpu") -> str | None:
        """Return why the cell cannot run: accelerate lacks the strategy or an option, or crashes on this device."""
        if STRATEGIES.get(cell.strategy).accelerate is None:
            return f"accelerate has no {cell.strategy}"
        if cell.option("conflict") and PRECISIONS.get(cell.precision).compute == "float32":
            return "accelerate sets no precision for fp32, so the JSON cannot contradict it"
        return _options.unsupported_by_accelerate(cell, device) or super().unsupported_reason(cell, device)

    def build(self, model: Module) -> None:
        """Make one Accelerator, then prepare data, model, optimizer and scheduler together."""
        from accelerate import Accelerator
        from torch.utils.data import DataLoader

        assert self.strategy.accelerate is not None
        settings = dict(self.strategy.accelerate(self.precision, self.cell, self.wrap_spec))
        settings["mixed_precision"] = self._mixed_precision()
        settings["gradient_accumulation_steps"] = self.accumulate
        settings |= self._compilation(model)
        if self.world.device == "cpu":
            settings |= on_cpu(settings)
        settings.setdefault("kwargs_handlers", []).extend(self._recipe())
        self._recompute(model)
        self.accelerator = Accelerator(**self.cell.with_settings("Accelerator", self._with_objects(settings)))
        optimizer = self.make_optimizer(model)
        # accelerate's scheduler takes a step for each rank: https://huggingface.co/docs/accelerate/concept_guides/performance
        scheduler = self.make_scheduler(optimizer, every=self.world.size)
        data = self.dataset(self.world.size)
        rows = len(data) // (self.epoch * self.world.size)
        loader: DataLoader[Any] = DataLoader(data, batch_size=rows)  # type: ignore[arg-type]  # a list is a dataset
        prepared = self.accelerator.prepare(loader, model, optimizer, scheduler)
        self.loader, self.model, self.optimizer, self.scheduler = prepared
        self.scaler = self.accelerator.scaler

    def _with_objects(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of Accelerator with the objects whose fields the cell sets."""
        from accelerate import DataLoaderConfiguration, utils

        cell = self.cell
        if found := cell.settings("GradientAccumulationPlugin"):
            steps = {"num_steps": settings.pop("gradient_accumulation_steps")}
            settings["gradient_accumulation_plugin"] = utils.GradientAccumulationPlugin(**steps | found)
        if found := cell.settings("DataLoaderConfiguration"):
            settings["dataloader_config"] = DataLoaderConfiguration(**found)
        handlers = {type(one).__name__: one for one in settings["kwargs_handlers"]}
        for kind in utils.dataclasses.KwargsHandler.__subclasses__():
            if found := cell.settings(kind.__name__):
                was = handlers.get(kind.__name__)
                handlers[kind.__name__] = kind(**(vars(was) if was else {}) | found)
        return settings | {"kwargs_handlers": list(handlers.values())}

    def _mixed_precision(self) -> str:
        """Return accelerate's name of the precision; it calls DeepSpeed's low-precision mode mixed precision too."""
        if self.precision.float8:
            return "fp8"
        if self.precision.mixed or self.strategy.zero_stage is not None:
            return {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[self.precision.compute]
        return "no"

    def _compilation(self, model: Module) -> dict[str, Any]:
        from accelerate.utils import TorchDynamoPlugin

        mode = self.cell.option("compile")
        if mode == "partial":
            _options.compile_blocks(mode, self.wrap_spec.block_modules(model))
        if mode in {False, "partial"}:
            return {}
        settings: dict[str, Any] = {"backend": "inductor" if mode is True else "aot_eager"}
        if mode == "regional":
            settings["use_regional_compilation"] = True
        return {"dynamo_plugin": TorchDynamoPlugin(**self.cell.with_settings("TorchDynamoPlugin", settings))}

    def _recompute(self, model: Any) -> None:
        """Turn on activation checkpointing in the model; for FSDP accelerate does it."""
        if not self.cell.option("activation_checkpointing") or "fsdp" in self.cell.strategy:
            return
        _options.recompute_by_model(model, self.wrap_spec.block_modules(model))

    def _recipe(self) -> list[Any]:
        """Return the recipe for 8 bits; without all-gather in 8 bits, which DeepSpeed cannot do."""
        if not self.precision.float8:
            return []
        if self.cell.option("fp8_backend") == "te":
            from accelerate.utils import TERecipeKwargs

            return [TERecipeKwargs(fp8_format="HYBRID")]
        from accelerate.utils import AORecipeKwargs
        from torchao.float8 import Float8LinearConfig

        return [AORecipeKwargs(config=Float8LinearConfig(emulate=self.world.device == "cpu", pad_inner_dim=True))]

    def _next(self, number: int) -> Batch:
        """Return the next batch of the prepared loader, epoch after epoch; a resumed run skips those of the first."""
        if self._stream is None:
            self._stream = self._batches(self.micros(number)[0])
        return next(self._stream)

    def _batches(self, done: int) -> Iterator[Batch]:
        if done:
            yield from self.accelerator.skip_first_batches(self.loader, done)
        while True:
            yield from self.loader

    def step(self, number: int) -> float:
        """Run forward, backward, optimizer and scheduler step as in accelerate's documentation, and return the loss."""
        total, self.tokens = 0.0, 0
        for _ in self.micros(number):
            batch = self._next(number)
            self.tokens += self.tiny.count(batch)
            with self.accelerator.accumulate(self.model):
                loss = self.tiny.loss(self.model, batch)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                    self.grad_norm = None if norm is None else float(norm)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            total += float(loss.detach()) / self.accumulate
        return total

    def save(self, directory: Path) -> None:
        """Save a checkpoint by ``save_state``."""
        self.accelerator.save_state(str(directory))

    def load(self, directory: Path) -> None:
        """Load a checkpoint by ``load_state``."""
        self.accelerator.load_state(str(directory))

    def export(self, directory: Path) -> None:
        """Write the weights by ``save_model``; FSDP1 on CPU ranks, where gathering crashes, merges a sharded checkpoint."""
        unwrapped = self.accelerator.unwrap_model(self.model)
        main = self.accelerator.is_main_process
        if self.cell.option("lora"):
            unwrapped.save_pretrained(directory, is_main_process=main, state_dict=self._whole_state())
            return
        if self.cell.strategy == "fsdp1" and self.world.device == "cpu":
            _options.merge_shards(self.accelerator, self.model, directory)
        else:
            self.accelerator.save_model(self.model, str(directory))
        if main and hasattr(unwrapped, "config"):
            unwrapped.config.save_pretrained(directory)

    def _whole_state(self) -> Any:
        """Return ``get_state_dict``; for FSDP1 on CPU ranks torch's, without the offload that crashes it."""
        if self.cell.strategy != "fsdp1" or self.world.device != "cpu":
            return self.accelerator.get_state_dict(self.model)
        return _options.whole_state(self.model)

    def trainer_world_size(self) -> int | None:
        """Return accelerate's number of processes."""
        return int(self.accelerator.num_processes)


#: The releases of accelerate on which ``on_cpu`` was tested: from the first, up to but without the second.
TESTED_RELEASES = ("1.6", "2")


def check_version(version: str) -> None:
    """Raise RuntimeError for an accelerate too old for ``on_cpu``; warn about a major version that was not tested."""
    import warnings

    from packaging.version import Version

    first, after = TESTED_RELEASES
    if Version(version) < Version(first):
        raise RuntimeError(f"accelerate {version} cannot run FSDP2 on CPU ranks; {first} or newer is needed")
    if Version(version) >= Version(after):
        problem = f"accelerate {version}: running FSDP and DeepSpeed on CPU was tested below {after} only"
        warnings.warn(f"{problem}; believe the check 'active'", stacklevel=2)


def on_cpu(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that make ``Accelerator(**settings)`` run the requested strategy on CPU.

    Without them accelerate silently turns an FSDP plugin with ``cpu=True`` into plain DDP, one without it into a bare
    model without gradient sync, and a DeepSpeed plugin into plain DDP (``AcceleratorState.__init__``). For FSDP the
    shared state is set beforehand to a multi-device run on "cpu"; setting ``distributed_type`` is not documented.
    Tested with accelerate 1.6 to 1.15. The version is checked (RuntimeError), and the check ``active`` fails if it
    stops working.
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
