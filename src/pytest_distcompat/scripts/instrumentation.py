"""The calls of a script that the probe is told by, library by library; each is wrapped when its library arrives."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from pytest_distcompat.scripts import guard, lightning_instrumentation, trainer_instrumentation, wrappers
from pytest_distcompat.scripts.hosted_rank import claim, current_rank
from pytest_distcompat.scripts.import_hooks import on_import
from pytest_distcompat.scripts.recorder import Recorder
from pytest_distcompat.scripts.subjects import Subjects
from pytest_distcompat.scripts.wrappers import Arguments, Keywords, Steps, put


def install() -> None:
    """Have the points wrapped when their libraries are imported; nothing is imported for that."""
    on_import("torch", _groups)
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
        ("transformers.modeling_utils", lambda module: put(module.PreTrainedModel, "save_pretrained", _exports)),
        ("transformers.trainer", lambda module: trainer_instrumentation.wrap(module.Trainer)),
        *((f"{package}.trainer", lightning_instrumentation.trainer) for package in lightning_instrumentation.PACKAGES),
        *(
            (f"{package}.strategies", lightning_instrumentation.strategies)
            for package in lightning_instrumentation.PACKAGES
        ),
    ):
        on_import(name, wrap)


def _groups(torch: ModuleType) -> None:
    """A process may be a rank by its process group only."""
    if not torch.distributed.is_available():
        return
    original = torch.distributed.init_process_group

    def joined() -> None:
        if claim(torch.distributed.get_rank()) is not None:
            wrappers.recorder()

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        guard.attempt("torch.distributed.init_process_group", joined)
        return result

    torch.distributed.init_process_group = init_process_group


def _torch(torch: ModuleType) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def before(optimizer: Any, *_: Any) -> None:
        if (found := wrappers.recorder()) is not None:
            found.aside(found.about_to_step, optimizer)

    def after(*_: Any) -> None:
        if (found := wrappers.recorder()) is not None:
            found.aside(found.stepped)

    register_optimizer_step_pre_hook(guard.guarded("before an optimizer's step", before))
    register_optimizer_step_post_hook(guard.guarded("after an optimizer's step", after))
    # What ``loss.backward()`` calls.
    put(torch.autograd, "backward", wrappers.trains(_first))
    put(torch, "compile", wrappers.wraps(lambda result, _args: wrappers.models([result]), compiles=True))
    put(torch.nn.Module, "compile", wrappers.wraps(lambda _result, _args: (), compiles=True))
    put(
        torch,
        "save",
        wrappers.saves(
            lambda _result, args, kwargs: _file(args[1:2] or (kwargs.get("f"),)), everyone=False, model=False
        ),
    )
    put(torch.nn.parallel.DistributedDataParallel, "__init__", wrappers.constructs)
    put(torch.optim.Optimizer, "__init__", _noted(lambda subjects: subjects.made))
    put(torch.optim.lr_scheduler.LRScheduler, "__init__", _noted(lambda subjects: subjects.schedulers))
    if torch.distributed.is_available():
        put(torch.distributed, "destroy_process_group", wrappers.settles)
    if current_rank() is not None:
        # Now, for it hangs hooks into torch too, which must not happen while such are being called.
        wrappers.recorder()


def _first(args: Arguments, kwargs: Keywords) -> Any:
    return next(iter((*args, *kwargs.values())), None)


def _file(values: tuple[Any, ...]) -> Any:
    return values[0] if isinstance(values[0], (str, os.PathLike)) else None


def _safetensors(module: ModuleType) -> None:
    """``save_file(tensors, filename)`` and ``save_model(model, filename)``, by which scripts write safetensors themselves."""

    def where(_result: Any, args: Arguments, kwargs: Keywords) -> Any:
        return _second(args, kwargs, "filename")

    put(module, "save_file", wrappers.saves(where, everyone=False, model=False))
    put(module, "save_model", wrappers.saves(where, everyone=False))


def _second(args: Arguments, kwargs: Keywords, name: str) -> Any:
    return args[1] if len(args) > 1 else kwargs.get(name)


def _exports(found: Recorder, args: Arguments, kwargs: Keywords) -> Steps:
    """``model.save_pretrained(save_directory)``: what is trained is looked at, and its files are read."""
    if not found.depth:
        found.aside(found.settled)
    path = _second(args, kwargs, "save_directory") if kwargs.get("is_main_process", True) else None
    yield from wrappers.saves(lambda *_: path, everyone=False)(found, args, kwargs)


def _noted(where: Callable[[Subjects], list[weakref.ref[Any]]]) -> wrappers.Wrapper:
    """An ``__init__`` whose objects are noted in the order they are made."""

    def point(found: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001 - a point
        yield
        where(found.subjects).append(weakref.ref(args[0]))

    return point


def _fsdp(fsdp: ModuleType) -> None:
    put(fsdp.FullyShardedDataParallel, "__init__", wrappers.constructs)
    # In place: of one module, or of each in a list.
    put(
        fsdp,
        "fully_shard",
        wrappers.wraps(
            lambda _result, args: wrappers.models(args[0] if isinstance(args[0], (list, tuple)) else args[:1])
        ),
    )


def _checkpoints(checkpoint: ModuleType) -> None:
    def where(_result: Any, _args: Arguments, kwargs: Keywords) -> Any:
        """``save(state_dict, *, checkpoint_id=None, storage_writer=None)``."""
        return kwargs.get("checkpoint_id") or getattr(kwargs.get("storage_writer"), "path", None)

    # Where they are defined too, for those who import them from there.
    for module in (checkpoint, checkpoint.state_dict_saver):
        put(module, "save", wrappers.saves(where))
        put(module, "async_save", wrappers.saves(where))
    for module in (checkpoint, checkpoint.state_dict_loader):
        put(module, "load", wrappers.loads)


def _state_dicts(module: ModuleType) -> None:
    """Of a fresh optimizer these take a step on no gradients (https://github.com/pytorch/pytorch/pull/125708)."""
    for name in ("get_state_dict", "get_optimizer_state_dict", "set_state_dict", "set_optimizer_state_dict"):
        put(module, name, wrappers.hides)


def _accelerate(module: ModuleType) -> None:
    made = wrappers.wraps(lambda result, _args: result if isinstance(result, (tuple, list)) else (result,))

    def prepares(found: Recorder, args: Arguments, kwargs: Keywords) -> Steps:
        found.subjects.accelerator = weakref.ref(args[0])
        yield from made(found, args, kwargs)

    accelerator = module.Accelerator
    for name in ("prepare", "prepare_model"):
        put(accelerator, name, prepares)
    for name in ("get_state_dict", "save_model", "end_training"):
        put(accelerator, name, wrappers.settles)
    # The loss before it is divided or scaled.
    put(accelerator, "backward", wrappers.trains(lambda args, kwargs: _first(args[1:], kwargs)))
    put(accelerator, "save_state", wrappers.saves(lambda result, _args, _kwargs: result))
    put(accelerator, "load_state", wrappers.loads)


def _deepspeed(deepspeed: ModuleType) -> None:
    def steps(found: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001 - a point
        engine = args[0]
        found.aside(found.about_to_step, None, engine)
        before, found.in_engine = engine.global_steps, True
        try:
            with found.inside(training=True):
                yield
        finally:
            found.in_engine = False
        if engine.global_steps > before:
            found.aside(found.stepped)

    engine = deepspeed.DeepSpeedEngine
    put(deepspeed, "initialize", wrappers.wraps(lambda result, _args: result[:1]))
    put(engine, "backward", wrappers.trains(lambda args, kwargs: _first(args[1:], kwargs)))
    put(engine, "step", steps)
    put(engine, "save_checkpoint", wrappers.saves(lambda _result, args, kwargs: _first(args[1:], kwargs)))
    put(engine, "load_checkpoint", wrappers.loads)
