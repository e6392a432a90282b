"""Wrappers around library calls in a script: by them the probe sees what the script does.

The *probe* is the code that records, in each rank (process that trains), what an unmodified script
does. ``instrumentation`` replaces functions such as ``torch.save`` by ``wrap_attribute(torch,
"save", wrapper)``. The new function calls the original, and passes arguments and result on
unchanged. Around the call the wrapper tells the ``Recorder`` of this rank what happens.

A *wrapper* is a generator function of (recorder, positional arguments, keyword arguments). It runs
up to its ``yield`` before the original call; the ``yield`` returns the result of the call; the rest
runs after the call. If the call raises an exception, the generator is closed at its ``yield``:

    def wrapper(recorder, args, kwargs):
        with recorder.inside_call() as outermost:
            result = yield
        if outermost:
            ...  # report the result

Only the outermost call counts: when ``Accelerator.prepare`` calls ``fully_shard``, the second call
is not the script's. What a wrapper itself does to the script's objects must not be recorded as the
script's doing, so it calls the recorder by ``call_unobserved``. Functions such as ``saves(...)``
make wrappers for kinds of calls.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_distcompat.ext.scripts import guard
from pytest_distcompat.ext.scripts.environment import RUN, ProbeConfig
from pytest_distcompat.ext.scripts.hosted_rank import claim, current_rank
from pytest_distcompat.ext.scripts.recorder import Recorder

#: The positional arguments of a call, with ``self`` of a method.
Arguments = tuple[Any, ...]
#: The keyword arguments of a call.
Keywords = Mapping[str, Any]
#: A wrapper that runs: it yields once, and gets the result of the call.
Steps = Generator[None, Any, None]
#: (recorder, positional arguments, keyword arguments) -> generator that runs before and after the
#: call.
Wrapper = Callable[[Recorder, Arguments, Keywords], Steps]


def probe_config() -> ProbeConfig:
    """Return what the probe should record in this run."""
    return ProbeConfig.read(Path(os.environ[RUN]))


@functools.cache
def _recorder_of(pid: int) -> Recorder | None:
    """Return the recorder of the process ``pid``, None if it is no rank or the probe is off.

    It is cached by the pid: a fork of a rank has inherited the cache, and must not take the rank's
    recorder for its own.
    """
    del pid
    # A process without RANK that reaches a wrapper runs alone, so it becomes rank 0. ``claim``
    # returns None where another process is that rank.
    rank = current_rank() or claim(0)
    config = probe_config()
    if rank is None or not config.steps:
        return None
    return Recorder(rank, config)


def current_recorder() -> Recorder | None:
    """Return the recorder of this process, None if it is no rank or the probe is off."""
    return _recorder_of(os.getpid())


def wrap_attribute(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Replace ``owner.name``, if it exists, by a function that runs the wrapper around it.

    In a process without a recorder the function only calls the original.

    Args:
        owner: A module or a class.
        name: The name of a function or method in it.
        wrapper: What runs around each call.
    """
    original = getattr(owner, name, None)
    if original is None:
        # Not in this release of the library.
        return
    # Such as ``Accelerator.save_state``, for reports.
    qualified_name = f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"

    # ``guard.attempt`` calls a function of the probe. If that raises, the failure is logged, the
    # script goes on, and later attempts do nothing but those with ``always=True``.
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        steps = guard.attempt(qualified_name, _begin, wrapper, args, kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            # The wrapper must undo what it has changed, such as the recorder's depth.
            if steps is not None:
                guard.attempt(qualified_name, steps.close, always=True)
            raise
        guard.attempt(f"{qualified_name}, after the call", _finish, steps, result, always=True)
        return result

    setattr(owner, name, wrapped)


def _begin(wrapper: Wrapper, args: Arguments, kwargs: Keywords) -> Steps | None:
    """Run the code before the ``yield``, and return the generator; None without a recorder."""
    recorder = current_recorder()
    if recorder is None:
        return None
    steps = wrapper(recorder, args, kwargs)
    next(steps)
    return steps


def _finish(steps: Steps | None, result: Any) -> None:
    """Run the code after the ``yield``; once the probe has failed, only its ``finally`` clauses."""
    if steps is None:
        return
    if not guard.failed():
        # A generator that ends raises StopIteration.
        with contextlib.suppress(StopIteration):
            steps.send(result)
    steps.close()


def models(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the modules among the values."""
    import torch

    for value in values:
        if isinstance(value, torch.nn.Module):
            yield value


def wraps(
    made: Callable[[Any, Arguments], Iterable[Any]], *, first: int = 0, compiles: bool = False
) -> Wrapper:
    """Make a wrapper of a call that wraps models among its arguments.

    Args:
        made: Picks the wrapped models and optimizers that the call has made, from its result and
            its positional arguments.
        first: The index of the first argument that may be a model: 1 behind ``self``.
        compiles: Whether the call compiles the model: the probe's hooks in it must go then.
    """

    def wrapper(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:
        with recorder.inside_call() as outermost:
            # ``fully_shard`` takes a list of modules too.
            nested: list[Any] = []
            for value in args:
                if isinstance(value, (list, tuple)):
                    nested.extend(value)
            values = (*args[first:], *nested, *kwargs.values())
            unwrapped = list(models(values))
            if outermost:
                for model in unwrapped:
                    recorder.call_unobserved(recorder.tracked.read_unwrapped, model)
            if compiles and unwrapped:
                # In a compiled model the hooks would break the graph.
                recorder.remove_hooks()
            result = yield
        if outermost:
            for value in made(result, args):
                recorder.call_unobserved(recorder.after_wrap, value)

    return wrapper


#: Wraps the ``__init__(self, module)`` of a class that wraps a module, such as DDP. What the call
#: has made is ``self``, its first argument.
constructs = wraps(lambda _result, args: args[:1], first=1)


def trains(loss: Callable[[Arguments, Keywords], Any]) -> Wrapper:
    """Make a wrapper of a call that computes gradients, such as ``Accelerator.backward``.

    ``loss`` picks the loss from the call's positional and keyword arguments.
    """

    def wrapper(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:
        with recorder.inside_call(training=True) as outermost:
            if outermost:
                recorder.call_unobserved(recorder.before_backward, loss(args, kwargs))
            yield

    return wrapper


def saves(
    where: Callable[[Any, Arguments, Keywords], Any], *, everyone: bool = True, model: bool = True
) -> Wrapper:
    """Make a wrapper of a call that writes a file.

    Args:
        where: Returns the path from the call's result, arguments and keyword arguments; None if
            the call has written nothing of interest.
        everyone: Whether all ranks call it together: it writes a checkpoint, from which training
            can resume.
        model: Whether the file should hold the model, and not anything else.
    """

    def wrapper(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:
        with recorder.inside_call() as outermost:
            if outermost:
                recorder.call_unobserved(recorder.before_save, everyone)
            result = yield
        if not outermost:
            return
        path = where(result, args, kwargs)
        if path is not None:
            recorder.call_unobserved(recorder.after_save, path, everyone, model)

    return wrapper


def _around(before: str = "", after: str = "") -> Wrapper:
    """Make a wrapper that calls the recorder's methods of these names before and after the call.

    An empty name stands for no method.
    """

    # A wrapper has these arguments.
    def wrapper(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001
        with recorder.inside_call() as outermost:
            if outermost and before:
                recorder.call_unobserved(getattr(recorder, before))
            yield
        if outermost and after:
            recorder.call_unobserved(getattr(recorder, after))

    return wrapper


#: Wraps a call that reads a checkpoint.
loads = _around(after="after_load")
#: Wraps ``torch.load``, which hands over the parts of a file before the script loads them.
reads_file = _around(after="after_file_load")
#: Wraps a call that comes when training is over: the trained model is recorded before the script
#: drops it.
may_end_training = _around(before="record_final_model")
#: Wraps a call whose optimizer steps do not belong to the training. No method is called: it is
#: enough that ``inside_call`` marks the time as one outside of training.
ignores_steps = _around()
