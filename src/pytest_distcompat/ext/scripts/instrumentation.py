"""The library calls of a script that the probe wraps, and the start of the probe.

The *probe* is the code that records, inside its processes, what an unmodified script trains.
``enter()`` is called in every Python process of a launched script, by ``site/sitecustomize.py``,
before the script runs. It makes the process a *rank* if it is one of those that train together, and
registers hooks: when the script imports ``torch``, ``accelerate``, ``deepspeed`` or another library
in ``_CALLS``, its functions there are replaced by wrapped ones. A wrapped ``torch.save``, for
example, calls the original and then has the ``Recorder`` note the path that was saved. The script
gets the same results as ever.

A *wrapper* (``wrappers.Wrapper``) is a generator function with the arguments (recorder, positional
arguments, keyword arguments). What is before its ``yield`` runs before the original call, what is
after it runs after the call, and the ``yield`` returns the result. Functions such as
``wrappers.saves(...)`` make wrappers.

A wrapper calls methods of the recorder by ``recorder.call_unobserved(method)``: what the probe
itself computes is not recorded. ``recorder.tracked`` has the script's models, optimizers and
schedulers; ``recorder.states`` has other objects with a state dict that a load must bring back.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_distcompat.ext.scripts import bridge, guard, wrappers
from pytest_distcompat.ext.scripts.environment import ON_CPU, RUN
from pytest_distcompat.ext.scripts.hosted_rank import claim, current_rank
from pytest_distcompat.ext.scripts.import_hooks import on_import
from pytest_distcompat.ext.scripts.recorder import Recorder
from pytest_distcompat.ext.scripts.tracked_objects import TrackedObjects
from pytest_distcompat.ext.scripts.wrappers import Arguments, Keywords, Steps, Wrapper
from pytest_distcompat.world import World

#: The method of transformers' Trainer that writes ``checkpoint-N``. It is private, but the hook
#: ``on_save`` of a callback comes too late: when it is called, the files that other libraries wrote
#: for the Trainer would already count as checkpoints of their own.
#: ``tests/scripts/test_private_names.py`` fails when it changes.
SAVE = "_save_checkpoint"

#: Lightning is installed under two names, each with classes of its own.
LIGHTNING = ("pytorch_lightning", "lightning.pytorch")


def enter() -> None:
    """Start the probe and the CPU bridge in a Python process of a launched script.

    The bridge makes accelerate run FSDP and DeepSpeed without a GPU. A process with ``RANK`` in its
    environment, as torchrun sets it, claims that rank, unless another process is the rank already
    (its parent: children inherit the variable).
    """
    if os.environ.get(RUN):
        if os.environ.get("RANK", "").isdecimal():
            claim(int(os.environ["RANK"]))
            guard.attempt("the choice of a GPU", _share_gpus)
        install()
    if os.environ.get(ON_CPU) == "1":
        bridge.install()


def _share_gpus() -> None:
    """Let LOCAL_RANK, by which scripts choose their GPU, name one that exists.

    There may be fewer GPUs than ranks. Ranks that share a GPU divide its memory.
    """
    # ``World.from_environment`` sets LOCAL_RANK.
    if (
        wrappers.probe_config().device == "cuda"
        and {"WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()
    ):
        on_import("torch", World.from_environment("cuda").divide_memory_once_used)


def install() -> None:
    """Wrap each library's calls when the library is imported; import none."""
    # Without a probe, too, the process that launched the script must learn how each rank ends.
    on_import("torch", _process_groups)
    # How many steps are recorded in full; 0 leaves the probe out.
    if not wrappers.probe_config().steps:
        return
    for name, calls in _CALLS.items():
        on_import(name, functools.partial(_wrap, calls))
    on_import("torch", _optimizer_steps)
    for package in LIGHTNING:
        on_import(f"{package}.strategies", _lightning_strategies)


def _wrap(calls: Mapping[str, Wrapper], module: ModuleType) -> None:
    """Wrap these calls of a module that has just been imported.

    In a release of the library without one of their classes the probe fails, because it would see
    too little. A class that lacks only the method is left as it is.

    Args:
        calls: Path of a function below the module, such as ``Accelerator.prepare`` -> its wrapper.
        module: The module.
    """
    for path, wrapper in calls.items():
        *owners, name = path.split(".")
        owner: Any = module
        for owner_name in owners:
            owner = getattr(owner, owner_name)
        wrappers.wrap_attribute(owner, name, wrapper)


def _process_groups(torch: ModuleType) -> None:
    """Claim the rank when the process joins a group: wrap ``init_process_group``.

    To claim a rank is to make this process the rank of that number, for the probe and its log. In a
    process that ``mp.spawn`` or mpirun started nothing else tells its rank: it has no RANK in the
    environment.
    """
    if not torch.distributed.is_available():
        return
    original = torch.distributed.init_process_group

    def joined() -> None:
        if claim(torch.distributed.get_rank()) is not None:
            # The first call makes the recorder of this process.
            wrappers.current_recorder()

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        guard.attempt("torch.distributed.init_process_group", joined)
        return result

    torch.distributed.init_process_group = init_process_group


def _optimizer_steps(torch: ModuleType) -> None:
    """Register hooks of torch that run before and after each step of any optimizer."""
    del torch
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    def before(optimizer: Any, *_: Any) -> None:
        recorder = wrappers.current_recorder()
        if recorder is not None:
            recorder.call_unobserved(recorder.before_step, optimizer)

    def after(*_: Any) -> None:
        recorder = wrappers.current_recorder()
        if recorder is not None:
            recorder.call_unobserved(recorder.after_step)

    register_optimizer_step_pre_hook(guard.guarded("before an optimizer's step", before))
    register_optimizer_step_post_hook(guard.guarded("after an optimizer's step", after))
    if current_rank() is not None:
        # Make the recorder now: it registers such hooks too, which must not happen inside one.
        wrappers.current_recorder()


def _lightning_strategies(module: ModuleType) -> None:
    """Wrap ``load_checkpoint`` of each of Lightning's strategies that defines it.

    ``Trainer.fit(ckpt_path=...)`` reads a checkpoint by this method.
    """
    for kind in vars(module).values():
        if isinstance(kind, type) and "load_checkpoint" in vars(kind):
            wrappers.wrap_attribute(kind, "load_checkpoint", wrappers.loads)


def _first(args: Arguments, kwargs: Keywords) -> Any:
    """Return the first argument of a function, None without any."""
    values = (*args, *kwargs.values())
    return values[0] if values else None


def _first_of_method(args: Arguments, kwargs: Keywords) -> Any:
    """Return the first argument of a method."""
    return _first(args[1:], kwargs)


def _second(name: str) -> Callable[[Any, Arguments, Keywords], Any]:
    """Return a function that picks the path from a call such as ``torch.save(obj, path)``.

    The path is the second argument, by position or by that name. For a file object, which has no
    path, the function returns None.
    """

    def path(_result: Any, args: Arguments, kwargs: Keywords) -> Any:
        value = args[1] if len(args) > 1 else kwargs.get(name)
        if isinstance(value, (str, os.PathLike)):
            return value
        return None

    return path


def _dcp_path(_result: Any, _args: Arguments, kwargs: Keywords) -> Any:
    """Return the path of ``save(state_dict, *, checkpoint_id=None, storage_writer=None)``."""
    return kwargs.get("checkpoint_id") or getattr(kwargs.get("storage_writer"), "path", None)


def _trainer_checkpoint(_result: Any, args: Arguments, _kwargs: Keywords) -> Path:
    """Return the path of the checkpoint that a Trainer (``args[0]``) has written now."""
    trainer = args[0]
    return Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")


def _trainer_model(_result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Return the path of ``trainer.save_model(output_dir=None)``."""
    trainer = args[0]
    given = _first_of_method(args[:2], kwargs)
    return given or trainer.args.output_dir


def _exports(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:
    """Wrap ``model.save_pretrained(save_directory)``: record the trained model and the files."""
    # ``depth`` is how many wrapped calls are running. It is 0 if the script itself makes this call,
    # and not a library in a call such as ``Trainer.save_model``.
    if not recorder.depth:
        recorder.call_unobserved(recorder.record_final_model)
    path = _second("save_directory")
    if not kwargs.get("is_main_process", True):
        # Other ranks call it and write nothing.
        path = _no_path
    yield from wrappers.saves(path, everyone=False)(recorder, args, kwargs)


def _no_path(_result: Any, _args: Arguments, _kwargs: Keywords) -> None:
    """Pick no path: the call has saved nothing."""


def _tracks(choose_list: Callable[[TrackedObjects], list[weakref.ref[Any]]]) -> Wrapper:
    """Make a wrapper of an ``__init__`` that tracks the new object.

    ``choose_list`` returns the list to which it is added: the recorder's optimizers, say.
    """

    # A wrapper has these arguments.
    def wrapper(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001
        yield
        # The first argument of ``__init__`` is the object itself.
        choose_list(recorder.tracked).append(weakref.ref(args[0]))

    return wrapper


def _registers(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001
    """Wrap ``Accelerator.register_for_checkpointing(*objects)``: a load must bring them back."""
    yield
    recorder.states.add(args[1:])


def _averages(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001
    """Wrap the ``__init__`` of an average of weights, which a load must bring back."""
    yield
    recorder.states.add(args[:1])


def _several(value: Any) -> Iterable[Any]:
    """Return the elements of a list or tuple; of any other value, the value alone."""
    return value if isinstance(value, (tuple, list)) else (value,)


#: Wraps a call that returns what it has wrapped: one model or optimizer, or several.
_prepared = wrappers.wraps(lambda result, _args: _several(result))


def _prepares(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:
    """Wrap ``Accelerator.prepare``, and remember the Accelerator."""
    recorder.tracked.accelerator = weakref.ref(args[0])
    yield from _prepared(recorder, args, kwargs)


# A wrapper has these arguments.
def _engine_steps(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001
    """Wrap the ``step`` of a DeepSpeed engine.

    A script calls it after every micro-batch. The engine steps its optimizer in the last one only,
    and counts that in ``global_steps``.
    """
    engine = args[0]
    recorder.call_unobserved(recorder.before_step, None, engine)
    steps_before = engine.global_steps
    recorder.in_engine = True
    try:
        with recorder.inside_call(training=True):
            yield
    finally:
        recorder.in_engine = False
    if engine.global_steps > steps_before:
        recorder.call_unobserved(recorder.after_step)


def _constructs_trainer(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001
    """Wrap ``Trainer.__init__``: note the output directory, and add a callback."""
    yield
    trainer = args[0]
    from pytest_distcompat.ext.scripts.events import Output

    output = Path(trainer.args.output_dir).resolve()
    recorder.rank.log.write(Output(str(output)))
    trainer.add_callback(_callback(recorder))


def _callback(recorder: Recorder) -> Any:
    """Return a callback of transformers' Trainer that reports loads and the end of training."""
    from transformers import TrainerCallback

    class _RecordsLoad(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        """Callback that records the loaded state at the first step of a resumed training.

        The states of random number generators are back by then.
        """

        #: Whether the first step has begun.
        started = False

        def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            guard.attempt("TrainerCallback.on_step_begin", self._record_load, state)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            guard.attempt(
                "TrainerCallback.on_train_end",
                recorder.call_unobserved,
                recorder.record_final_model,
            )

        def _record_load(self, state: Any) -> None:
            # A training from the start begins with ``global_step`` 0: it has loaded nothing.
            if not self.started and state.global_step:
                recorder.call_unobserved(recorder.after_load)
            self.started = True

    return _RecordsLoad()


#: Module -> path of a function or method in it -> the wrapper. They are wrapped when the module has
#: been imported. The first argument of ``wrappers.wraps`` picks the wrapped models and optimizers
#: from the call's result and arguments, that of ``trains`` the loss, that of ``saves`` the path.
#: ``everyone=False``: the call writes no checkpoint, which all ranks do together; ``model=False``:
#: the file need not hold the model.
_CALLS: Mapping[str, Mapping[str, Wrapper]] = {
    "torch": {
        # What ``loss.backward()`` calls.
        "autograd.backward": wrappers.trains(_first),
        "compile": wrappers.wraps(lambda result, _args: wrappers.models([result]), compiles=True),
        # It compiles in place, so that no new model is wrapped.
        "nn.Module.compile": wrappers.wraps(lambda _result, _args: (), compiles=True),
        "save": wrappers.saves(_second("f"), everyone=False, model=False),
        "load": wrappers.reads_file,
        "nn.parallel.DistributedDataParallel.__init__": wrappers.constructs,
        "optim.Optimizer.__init__": _tracks(lambda tracked: tracked.torch_optimizers),
        "optim.lr_scheduler.LRScheduler.__init__": _tracks(lambda tracked: tracked.schedulers),
        "distributed.destroy_process_group": wrappers.may_end_training,
    },
    "torch.optim.swa_utils": {"AveragedModel.__init__": _averages},
    "torch.distributed.fsdp": {
        "FullyShardedDataParallel.__init__": wrappers.constructs,
        # It wraps its first argument in place: one module, or each of a list.
        "fully_shard": wrappers.wraps(lambda _result, args: wrappers.models(_several(args[0]))),
    },
    # In the defining modules too, because a script may import them from there.
    "torch.distributed.checkpoint": {
        **dict.fromkeys(
            ("save", "state_dict_saver.save", "async_save", "state_dict_saver.async_save"),
            wrappers.saves(_dcp_path),
        ),
        **dict.fromkeys(("load", "state_dict_loader.load"), wrappers.loads),
    },
    # They step a fresh optimizer without gradients: https://github.com/pytorch/pytorch/pull/125708.
    "torch.distributed.checkpoint.state_dict": dict.fromkeys(
        (
            "get_state_dict",
            "get_optimizer_state_dict",
            "set_state_dict",
            "set_optimizer_state_dict",
        ),
        wrappers.ignores_steps,
    ),
    "accelerate.accelerator": {
        **dict.fromkeys(("Accelerator.prepare", "Accelerator.prepare_model"), _prepares),
        **dict.fromkeys(
            ("Accelerator.get_state_dict", "Accelerator.save_model", "Accelerator.end_training"),
            wrappers.may_end_training,
        ),
        # The argument is the loss before it is divided or scaled.
        "Accelerator.backward": wrappers.trains(_first_of_method),
        # It returns the path.
        "Accelerator.save_state": wrappers.saves(lambda result, _args, _kwargs: result),
        "Accelerator.load_state": wrappers.loads,
        "Accelerator.register_for_checkpointing": _registers,
    },
    "deepspeed": {
        # The engine is the first of what it returns.
        "initialize": wrappers.wraps(lambda result, _args: result[:1]),
        "DeepSpeedEngine.backward": wrappers.trains(_first_of_method),
        "DeepSpeedEngine.step": _engine_steps,
        "DeepSpeedEngine.save_checkpoint": wrappers.saves(
            lambda _result, args, kwargs: _first_of_method(args, kwargs)
        ),
        "DeepSpeedEngine.load_checkpoint": wrappers.loads,
    },
    "safetensors.torch": {
        "save_file": wrappers.saves(_second("filename"), everyone=False, model=False),
        "save_model": wrappers.saves(_second("filename"), everyone=False),
    },
    "transformers.modeling_utils": {"PreTrainedModel.save_pretrained": _exports},
    "transformers.trainer": {
        "Trainer.__init__": _constructs_trainer,
        f"Trainer.{SAVE}": wrappers.saves(_trainer_checkpoint),
        # The final model, from which no training resumes.
        "Trainer.save_model": wrappers.saves(_trainer_model, everyone=False),
    },
    # All ranks call it, and it writes through a file system of Lightning's own:
    # https://lightning.ai/docs/pytorch/stable/common/trainer.html.
    **{
        f"{package}.trainer": {"Trainer.save_checkpoint": wrappers.saves(_second("filepath"))}
        for package in LIGHTNING
    },
}
