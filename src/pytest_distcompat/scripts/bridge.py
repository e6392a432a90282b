"""Ranks on the CPU that run what accelerate and transformers keep for GPUs: FSDP and DeepSpeed over gloo.

Left alone, accelerate takes the FSDP branch for accelerators only: on the CPU it trains bare models, or plain DDP, and says
nothing. What makes it run what it is asked for is ``drivers.accelerate.on_cpu``, which the built-in drivers call too; here it
is called at the one place that all scripts come by, the first ``PartialState``, and ``TrainingArguments`` are told that the
CPU is meant. In effect on CPU ranks only, checked against accelerate's version, and told in every report.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from pytest_distcompat.scripts import guard
from pytest_distcompat.scripts.hosted_rank import current_rank
from pytest_distcompat.scripts.import_hooks import on_import


def install() -> None:
    """Wait for the libraries; nothing is imported."""
    on_import("accelerate.state", _accelerate)
    on_import("transformers.training_args", _transformers)
    on_import("deepspeed.ops", _deepspeed)


def _tell(what: str) -> None:
    found = current_rank()
    if found is not None:
        guard.attempt("the CPU bridge", found.log.write, "bridge", what=what, always=True)


def _is(name: str) -> bool:
    return os.environ.get(name, "").lower() in {"1", "true", "yes"}


def _asked() -> Mapping[str, None]:
    """What the environment, by which ``accelerate launch`` and Accelerator's own plugins speak, asks for."""
    if _is("ACCELERATE_USE_DEEPSPEED"):
        return {"deepspeed_plugin": None}
    return {"fsdp_plugin": None} if _is("ACCELERATE_USE_FSDP") else {}


def _accelerate(state: ModuleType) -> None:
    """The first ``PartialState`` of a rank, whoever makes it."""
    original = state.PartialState.__init__
    busy: list[bool] = []

    @functools.wraps(original)
    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        # The state is shared by all instances: an empty one is the first.
        if busy or state.PartialState._shared_state or int(os.environ.get("WORLD_SIZE", "1")) < 2:  # noqa: SLF001 - transformers asks so too
            original(self, cpu, **kwargs)
            return
        from pytest_distcompat.drivers.accelerate import on_cpu

        asked = dict(_asked())
        busy.append(True)
        try:
            settings = on_cpu(asked)
        finally:
            busy.clear()
        for handler in settings.pop("kwargs_handlers", ()):
            kwargs = {**handler.to_kwargs(), **{name: value for name, value in kwargs.items() if value is not None}}
        original(self, settings.pop("cpu", cpu), **kwargs)
        import accelerate

        _tell(
            f"accelerate {accelerate.__version__} runs {next(iter(asked), 'ddp').removesuffix('_plugin')} on gloo ranks"
        )

    state.PartialState.__init__ = init


def _transformers(module: ModuleType) -> None:
    """``TrainingArguments`` that say nothing of the device would take bfloat16 for a mistake, and each rank for alone."""
    original = module.TrainingArguments.__post_init__

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self.use_cpu = True
            if self.fsdp:
                # Said too late for the first state otherwise.
                os.environ["ACCELERATE_USE_FSDP"] = "true"
            _tell("TrainingArguments use the CPU")
        original(self, *args, **kwargs)

    module.TrainingArguments.__post_init__ = post_init


def _deepspeed(ops: ModuleType) -> None:
    """Its all-reduce through shared memory would be compiled first, and leaves the memory behind."""
    del ops
    from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory

    without_shared_memory()
