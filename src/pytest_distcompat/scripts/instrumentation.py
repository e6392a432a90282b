"""Library calls that are wrapped so that the probe sees them; each when its library has been imported."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from pytest_distcompat.scripts import bridge, guard, trainer_instrumentation, wrappers
from pytest_distcompat.scripts.environment import ON_CPU, RUN
from pytest_distcompat.scripts.hosted_rank import claim, current_rank
from pytest_distcompat.scripts.import_hooks import on_import
from pytest_distcompat.scripts.recorder import Recorder
from pytest_distcompat.scripts.tracked_objects import TrackedObjects
from pytest_distcompat.scripts.wrappers import Arguments, Keywords, Steps, wrap_attribute


def enter() -> None:
    """Start the probe and the CPU bridge in a Python process of a launched script; claim the rank if it is one."""
    if os.environ.get(RUN):
        if os.environ.get("RANK", "").isdecimal():
            claim(int(os.environ["RANK"]))
        install()
    if os.environ.get(ON_CPU) == "1":
        bridge.install()


def install() -> None:
    """Wrap each library's calls when the library is imported; import none."""
    on_import("torch", _process_groups)
    if not wrappers.probe_config().steps:
        return
    for name, wrap in (
        ("torch", _torch),
        ("torch.distributed.fsdp", _fsdp),
        ("torch.distributed.checkpoint", _checkpoints),
        ("torch.distributed.checkpoint.state_dict", _state_dicts),
        ("accelerate.accelerator", _accelerate),
        ("deepspeed", _deepspeed),
        ("safetensors.torch", _safetensors),
        (
            "transformers.modeling_utils",
            lambda module: wrap_attribute(module.PreTrainedModel, "save_pretrained", _exports),
        ),
        ("transformers.trainer", lambda module: trainer_instrumentation.wrap(module.Trainer)),
    ):
        on_import(name, wrap)
    for package in trainer_instrumentation.LIGHTNING:
        on_import(f"{package}.trainer", trainer_instrumentation.wrap_lightning)
        on_import(f"{package}.strategies", trainer_instrumentation.wrap_lightning_strategies)


def _process_groups(torch: ModuleType) -> None:
    """Claim the rank when the process joins a group: without RANK in the environment nothing else makes it a rank."""
    if not torch.distributed.is_available():
        return
    original = torch.distributed.init_process_group

    def joined() -> None:
        if claim(torch.distributed.get_rank()) is not None:
            wrappers.current_recorder()

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        guard.attempt("torch.distributed.init_process_group", joined)
        return result

    torch.distributed.init_process_group = init_process_group


def _torch(torch: ModuleType) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def before(optimizer: Any, *_: Any) -> None:
        if (recorder := wrappers.current_recorder()) is not None:
            recorder.call_unobserved(recorder.before_step, optimizer)

    def after(*_: Any) -> None:
        if (recorder := wrappers.current_recorder()) is not None:
            recorder.call_unobserved(recorder.after_step)

    register_optimizer_step_pre_hook(guard.guarded("before an optimizer's step", before))
    register_optimizer_step_post_hook(guard.guarded("after an optimizer's step", after))
    # What ``loss.backward()`` calls.
    wrap_attribute(torch.autograd, "backward", wrappers.trains(_first_argument))
    wrap_attribute(torch, "compile", wrappers.wraps(lambda result, _args: wrappers.models([result]), compiles=True))
    wrap_attribute(torch.nn.Module, "compile", wrappers.wraps(lambda _result, _args: (), compiles=True))
    wrap_attribute(
        torch,
        "save",
        wrappers.saves(
            lambda _result, args, kwargs: _path_or_none(args[1:2] or (kwargs.get("f"),)), everyone=False, model=False
        ),
    )
    wrap_attribute(torch.nn.parallel.DistributedDataParallel, "__init__", wrappers.constructs)
    wrap_attribute(torch.optim.Optimizer, "__init__", _tracks(lambda tracked: tracked.torch_optimizers))
    wrap_attribute(torch.optim.lr_scheduler.LRScheduler, "__init__", _tracks(lambda tracked: tracked.schedulers))
    if torch.distributed.is_available():
        wrap_attribute(torch.distributed, "destroy_process_group", wrappers.may_end_training)
    if current_rank() is not None:
        # The recorder registers hooks of torch, which must not happen later, inside such a hook.
        wrappers.current_recorder()


def _first_argument(args: Arguments, kwargs: Keywords) -> Any:
    return next(iter((*args, *kwargs.values())), None)


def _path_or_none(values: tuple[Any, ...]) -> Any:
    return values[0] if isinstance(values[0], (str, os.PathLike)) else None


def _safetensors(module: ModuleType) -> None:
    """Wrap ``save_file(tensors, filename)`` and ``save_model(model, filename)``."""

    def where(_result: Any, args: Arguments, kwargs: Keywords) -> Any:
        return wrappers.second(args, kwargs, "filename")

    wrap_attribute(module, "save_file", wrappers.saves(where, everyone=False, model=False))
    wrap_attribute(module, "save_model", wrappers.saves(where, everyone=False))


def _exports(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:
    """Wrap ``model.save_pretrained(save_directory)``: record the trained model and the files."""
    if not recorder.depth:
        recorder.call_unobserved(recorder.record_final_model)
    path = wrappers.second(args, kwargs, "save_directory") if kwargs.get("is_main_process", True) else None
    yield from wrappers.saves(lambda *_: path, everyone=False)(recorder, args, kwargs)


def _tracks(choose_list: Callable[[TrackedObjects], list[weakref.ref[Any]]]) -> wrappers.Wrapper:
    """Make a wrapper of an ``__init__`` that adds the new object to the list that ``choose_list`` returns."""

    def wrapper(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001 - a wrapper
        yield
        choose_list(recorder.tracked).append(weakref.ref(args[0]))

    return wrapper


def _fsdp(fsdp: ModuleType) -> None:
    wrap_attribute(fsdp.FullyShardedDataParallel, "__init__", wrappers.constructs)
    # It wraps in place: one module, or each of a list.
    wrap_attribute(
        fsdp,
        "fully_shard",
        wrappers.wraps(
            lambda _result, args: wrappers.models(args[0] if isinstance(args[0], (list, tuple)) else args[:1])
        ),
    )


def _checkpoints(checkpoint: ModuleType) -> None:
    def where(_result: Any, _args: Arguments, kwargs: Keywords) -> Any:
        """Return the path of ``save(state_dict, *, checkpoint_id=None, storage_writer=None)``."""
        return kwargs.get("checkpoint_id") or getattr(kwargs.get("storage_writer"), "path", None)

    # In the defining modules too, because a script may import them from there.
    for module in (checkpoint, checkpoint.state_dict_saver):
        wrap_attribute(module, "save", wrappers.saves(where))
        wrap_attribute(module, "async_save", wrappers.saves(where))
    for module in (checkpoint, checkpoint.state_dict_loader):
        wrap_attribute(module, "load", wrappers.loads)


def _state_dicts(module: ModuleType) -> None:
    """Wrap the functions that step a fresh optimizer without gradients (https://github.com/pytorch/pytorch/pull/125708)."""
    for name in ("get_state_dict", "get_optimizer_state_dict", "set_state_dict", "set_optimizer_state_dict"):
        wrap_attribute(module, name, wrappers.ignores_steps)


def _accelerate(module: ModuleType) -> None:
    made = wrappers.wraps(lambda result, _args: result if isinstance(result, (tuple, list)) else (result,))

    def prepares(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:
        recorder.tracked.accelerator = weakref.ref(args[0])
        yield from made(recorder, args, kwargs)

    accelerator = module.Accelerator
    for name in ("prepare", "prepare_model"):
        wrap_attribute(accelerator, name, prepares)
    for name in ("get_state_dict", "save_model", "end_training"):
        wrap_attribute(accelerator, name, wrappers.may_end_training)
    # The argument is the loss before it is divided or scaled.
    wrap_attribute(accelerator, "backward", wrappers.trains(lambda args, kwargs: _first_argument(args[1:], kwargs)))
    wrap_attribute(accelerator, "save_state", wrappers.saves(lambda result, _args, _kwargs: result))
    wrap_attribute(accelerator, "load_state", wrappers.loads)


def _deepspeed(deepspeed: ModuleType) -> None:
    def steps(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001 - a wrapper
        engine = args[0]
        recorder.call_unobserved(recorder.before_step, None, engine)
        before, recorder.in_engine = engine.global_steps, True
        try:
            with recorder.inside_call(training=True):
                yield
        finally:
            recorder.in_engine = False
        if engine.global_steps > before:
            recorder.call_unobserved(recorder.after_step)

    engine = deepspeed.DeepSpeedEngine
    wrap_attribute(deepspeed, "initialize", wrappers.wraps(lambda result, _args: result[:1]))
    wrap_attribute(engine, "backward", wrappers.trains(lambda args, kwargs: _first_argument(args[1:], kwargs)))
    wrap_attribute(engine, "step", steps)
    wrap_attribute(
        engine, "save_checkpoint", wrappers.saves(lambda _result, args, kwargs: _first_argument(args[1:], kwargs))
    )
    wrap_attribute(engine, "load_checkpoint", wrappers.loads)
