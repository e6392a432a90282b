"""CPU bridge: makes accelerate and transformers run FSDP and DeepSpeed on CPU ranks over gloo.

Without a GPU accelerate silently trains a bare model, or DDP, where the script says FSDP
(``launch.accelerate_cpu`` says why, and has the way around it). ``launch`` therefore sets a
variable in the environment, and ``instrumentation.enter`` calls ``install()`` in each process of
the script. It changes two classes when their library is imported: accelerate's ``PartialState``,
the state of the process group, which every use of accelerate makes first, and transformers'
``TrainingArguments``, which get ``use_cpu=True``. Each change is logged, and every report of the
run names it ("CPU bridge: ...").
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from pytest_distcompat.ext.scripts import guard
from pytest_distcompat.ext.scripts.hosted_rank import current_rank
from pytest_distcompat.ext.scripts.import_hooks import on_import
from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory


def install() -> None:
    """Patch the libraries when they are imported; import none."""
    on_import("accelerate.state", _patch_accelerate)
    on_import("transformers.training_args", _patch_transformers)
    # DeepSpeed's own all-reduce on the CPU is switched off, so that gloo does the work.
    on_import("deepspeed.ops", lambda _: without_shared_memory())


def _log_change(description: str) -> None:
    """Log a change, such as ``TrainingArguments use the CPU``, if this process is a rank."""
    rank = current_rank()
    if rank is not None:
        from pytest_distcompat.ext.scripts.events import Bridged

        # ``attempt`` calls the second argument with the third, and lets no exception reach the
        # script; ``always``: also if the probe has failed before.
        guard.attempt("the CPU bridge", rank.log.write, Bridged(description), always=True)


def _requested_plugin() -> dict[str, Any]:
    """Return the plugin that the environment requests: ``{"fsdp_plugin": None}``; empty for none.

    ``accelerate launch`` and Accelerator's plugins set the environment variables
    ``ACCELERATE_USE_FSDP`` and ``ACCELERATE_USE_DEEPSPEED``. The dictionary is for ``on_cpu``,
    which asks only whether the key is there.
    """
    for name in ("deepspeed", "fsdp"):
        requested = os.environ.get(f"ACCELERATE_USE_{name.upper()}", "")
        if requested.lower() in {"1", "true", "yes"}:
            return {f"{name}_plugin": None}
    return {}


def _patch_accelerate(state: ModuleType) -> None:
    """Pass the arguments that ``on_cpu`` returns to the first ``PartialState`` of a rank."""
    original = state.PartialState.__init__
    #: Not empty inside ``on_cpu``, which makes a state itself.
    busy: list[bool] = []

    @functools.wraps(original)
    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        # All instances share one state, so an empty one means that this is the first. transformers
        # reads that private attribute too.
        is_first = not state.PartialState._shared_state  # noqa: SLF001
        is_rank_of_several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if busy or not is_first or not is_rank_of_several:
            original(self, cpu, **kwargs)
            return
        from pytest_distcompat.launch.accelerate_cpu import on_cpu

        plugin = _requested_plugin()
        busy.append(True)
        try:
            # Arguments for accelerate: ``{"cpu": True}`` for DDP, ``{"kwargs_handlers": [...]}``
            # for DeepSpeed; empty for FSDP, whose shared state ``on_cpu`` makes itself.
            settings = on_cpu(plugin)
        finally:
            busy.clear()
        # Handlers are accelerate's objects with arguments of ``init_process_group``. What the
        # script gives itself comes first.
        for handler in settings.pop("kwargs_handlers", ()):
            given = {name: value for name, value in kwargs.items() if value is not None}
            kwargs = {**handler.to_kwargs(), **given}
        original(self, settings.pop("cpu", cpu), **kwargs)
        import accelerate

        requested = next(iter(plugin), "ddp")
        plugin_name = requested.removesuffix("_plugin")
        _log_change(f"accelerate {accelerate.__version__} runs {plugin_name} on gloo ranks")

    state.PartialState.__init__ = init


def _patch_transformers(module: ModuleType) -> None:
    """Set ``use_cpu`` of ``TrainingArguments`` on the CPU.

    Without it they reject bfloat16 and take each rank for a single process.
    """
    original = module.TrainingArguments.__post_init__

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self.use_cpu = True
            if self.fsdp:
                # TrainingArguments would set it only after the first state was made.
                os.environ["ACCELERATE_USE_FSDP"] = "true"
            _log_change("TrainingArguments use the CPU")
        original(self, *args, **kwargs)

    module.TrainingArguments.__post_init__ = post_init
