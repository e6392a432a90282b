"""How a call of the script is wrapped so that the probe sees it: the original gets the very arguments and gives the very result.

A point is a generator: what stands before its ``yield`` runs before the original call, the ``yield`` gives the result, and
what stands behind it runs afterwards. Only ``put`` runs points, and only through ``guard``.

Only the outermost call counts: what ``Accelerator.prepare`` does by ``fully_shard`` is accelerate's own business.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_distcompat.scripts import guard
from pytest_distcompat.scripts.environment import RUN
from pytest_distcompat.scripts.hosted_rank import claim, current_rank
from pytest_distcompat.scripts.probe_config import ProbeConfig
from pytest_distcompat.scripts.recorder import Recorder

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]
Steps = Generator[None, Any, None]
#: (recorder, positional arguments, keyword arguments) -> what is done before and after the call.
Wrapper = Callable[[Recorder, Arguments, Keywords], Steps]


def probe_config() -> ProbeConfig:
    """How much the probe is to look at in this run."""
    return ProbeConfig.read(Path(os.environ[RUN]))


@functools.cache
def _recorder_of(pid: int) -> Recorder | None:
    """One for each process that is a rank. One that calls a point and is none yet is the only one: its RANK is 0."""
    del pid
    rank, config = current_rank() or claim(0), probe_config()
    return Recorder(rank, config) if rank is not None and config.steps else None


def recorder() -> Recorder | None:
    """This process's."""
    return _recorder_of(os.getpid())


def put(owner: Any, name: str, point: Wrapper) -> None:
    """Wrap ``owner.name``, if there is such a thing, in the point; without a recorder nothing changes."""
    original = getattr(owner, name, None)
    if original is None:
        return
    where = f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        steps = guard.attempt(where, _begin, point, args, kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            guard.attempt(where, _leave, steps, always=True)
            raise
        guard.attempt(f"{where}, after the call", _finish, steps, result, always=True)
        return result

    setattr(owner, name, wrapper)


def _begin(point: Wrapper, args: Arguments, kwargs: Keywords) -> Steps | None:
    found = recorder()
    if found is None:
        return None
    steps = point(found, args, kwargs)
    next(steps)
    return steps


def _finish(steps: Steps | None, result: Any) -> None:
    """Do what comes after the call; once the probe has failed, only what must be undone."""
    if steps is not None and not guard.failed():
        with contextlib.suppress(StopIteration):
            steps.send(result)
    _leave(steps)


def _leave(steps: Steps | None) -> None:
    if steps is not None:
        steps.close()


def models(values: Iterable[Any]) -> Iterator[Any]:
    """The modules among them."""
    import torch

    yield from (value for value in values if isinstance(value, torch.nn.Module))


def wraps(made: Callable[[Any, Arguments], Iterable[Any]], *, compiles: bool = False) -> Wrapper:
    """A call that makes a model the trainer's: the models among its arguments are plain for the last time.

    ``made`` picks what holds the model from then on, of the result and the arguments.
    """

    def point(found: Recorder, args: Arguments, kwargs: Keywords) -> Steps:
        with found.inside() as outermost:
            nested = [one for value in args if isinstance(value, (list, tuple)) for one in value]
            given = list(models((*args, *nested, *kwargs.values())))
            for model in given if outermost else ():
                found.aside(found.about_to_wrap, model)
            if compiles and given:
                found.compiled()
            result = yield
        for value in made(result, args) if outermost else ():
            found.aside(found.made, value)

    return point


def constructs(found: Recorder, args: Arguments, kwargs: Keywords) -> Steps:
    """A wrapper's ``__init__(self, module)``."""
    with found.inside() as outermost:
        for model in models((*args[1:], *kwargs.values())) if outermost else ():
            found.aside(found.about_to_wrap, model)
        yield
    if outermost:
        found.aside(found.made, args[0])


def trains(loss: Callable[[Arguments, Keywords], Any]) -> Wrapper:
    """A call that computes gradients of the loss that ``loss`` picks of its arguments."""

    def point(found: Recorder, args: Arguments, kwargs: Keywords) -> Steps:
        with found.inside(training=True) as outermost:
            if outermost:
                found.aside(found.backward, loss(args, kwargs))
            yield

    return point


def saves(where: Callable[[Any, Arguments, Keywords], Any], *, everyone: bool = True, model: bool = True) -> Wrapper:
    """A call that writes a checkpoint to the path that ``where`` picks of its result and arguments, None for no path.

    ``everyone``: on all ranks, and training can go on from it; the others are but files. ``model``: the model is to be in it;
    what else a script may write by the call is its own business.
    """

    def point(found: Recorder, args: Arguments, kwargs: Keywords) -> Steps:
        with found.inside() as outermost:
            if outermost:
                found.aside(found.about_to_save, everyone)
            result = yield
        path = where(result, args, kwargs) if outermost else None
        if path is not None:
            found.aside(found.saved, path, everyone, model)

    return point


def loads(found: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001 - a point
    """A call that reads a checkpoint."""
    with found.inside() as outermost:
        yield
    if outermost:
        found.aside(found.loaded)


def settles(found: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001 - a point
    """A call that comes when training is over: the trained model is looked at before it goes away."""
    with found.inside() as outermost:
        if outermost:
            found.aside(found.settled)
        yield


def hides(found: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001 - a point
    """A call in which steps are none of the training's."""
    with found.inside():
        yield
