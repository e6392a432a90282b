"""How a call is wrapped so that the probe is told of it: the original gets the very arguments and gives the very result.

Only the outermost call counts: what ``Accelerator.prepare`` does by ``fully_shard`` is accelerate's own business.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_distcompat.scripts.environment import RUN
from pytest_distcompat.scripts.presence import claim, present
from pytest_distcompat.scripts.recorder import Recorder
from pytest_distcompat.scripts.sight import Sight

Arguments = tuple[Any, ...]
#: (recorder, the original) -> what is called in its place.
Around = Callable[[Recorder, Callable[..., Any]], Callable[..., Any]]


def sight() -> Sight:
    """How much the probe is to look at in this run."""
    return Sight.read(Path(os.environ[RUN]))


@functools.cache
def _recorder_of(pid: int) -> Recorder | None:
    """One for each process that is a rank. One that calls a point and is none yet is the only one: its RANK is 0."""
    del pid
    presence, seen = present() or claim(0), sight()
    return Recorder(presence, seen) if presence is not None and seen.steps else None


def recorder() -> Recorder | None:
    """This process's."""
    return _recorder_of(os.getpid())


def put(owner: Any, name: str, around: Around) -> None:
    """Put ``around(recorder, original)`` in the place of ``owner.name``, if there is one; without a recorder nothing changes."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        found = recorder()
        return original(*args, **kwargs) if found is None else around(found, original)(*args, **kwargs)

    setattr(owner, name, wrapper)


def models(values: Iterable[Any]) -> Iterator[Any]:
    """The modules among them."""
    import torch

    yield from (value for value in values if isinstance(value, torch.nn.Module))


def wraps(made: Callable[[Any, Arguments], Iterable[Any]], *, compiles: bool = False) -> Around:
    """A call that makes a model the trainer's: the models among its arguments are plain for the last time.

    ``made`` picks what holds the model from then on, of the result and the arguments.
    """

    def around(found: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with found.inside() as outermost:
                nested = [one for value in args if isinstance(value, (list, tuple)) for one in value]
                given = list(models((*args, *nested, *kwargs.values())))
                for model in given if outermost else ():
                    found.guard(found.about_to_wrap, model)
                if compiles and given:
                    found.compiled()
                result = original(*args, **kwargs)
            for value in made(result, args) if outermost else ():
                found.guard(found.made, value)
            return result

        return call

    return around


def constructs(found: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper's ``__init__(self, module)``."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with found.inside() as outermost:
            for model in models((*args, *kwargs.values())) if outermost else ():
                found.guard(found.about_to_wrap, model)
            original(self, *args, **kwargs)
        if outermost:
            found.guard(found.made, self)

    return init


def trains(loss: Callable[[Arguments, Mapping[str, Any]], Any]) -> Around:
    """A call that computes gradients of the loss that ``loss`` picks of its arguments."""

    def around(found: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with found.inside(training=True) as outermost:
                if outermost:
                    found.guard(found.backward, loss(args, kwargs))
                return original(*args, **kwargs)

        return call

    return around


def saves(where: Callable[[Any, Arguments, Mapping[str, Any]], Any], *, everyone: bool = True) -> Around:
    """A call that writes a checkpoint to the path that ``where`` picks of its result and arguments, None for no path.

    ``everyone``: on all ranks, and training can go on from it; the others are but files.
    """

    def around(found: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with found.inside() as outermost:
                if outermost:
                    found.guard(found.about_to_save, everyone)
                result = original(*args, **kwargs)
            path = where(result, args, kwargs) if outermost else None
            if path is not None:
                found.guard(found.saved, path, everyone)
            return result

        return call

    return around


def loads(found: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """A call that reads a checkpoint."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with found.inside() as outermost:
            result = original(*args, **kwargs)
        if outermost:
            found.guard(found.loaded)
        return result

    return call


def settles(found: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """A call that comes when training is over: the trained model is looked at before it goes away."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with found.inside() as outermost:
            if outermost:
                found.guard(found.settled)
            return original(*args, **kwargs)

    return call


def hides(found: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """A call in which steps are none of the training's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with found.inside():
            return original(*args, **kwargs)

    return call
