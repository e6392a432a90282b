"""Script that shows a walk without this plugin, for a bug report to the authors of a library.

A *walk* is a sequence of calls of a live trainer that went wrong: ``step(), save(), step()``. Its
``kind`` is the driver's class of calls, a subclass of ``Calls`` with a method for each. ``Calls``
itself has the same methods for the *reference*, one process with the bare model.

``distcompat walk --script walk.py`` writes what ``script`` returns here; ``torchrun walk.py`` then
makes the same calls on several ranks and on the reference, compares both, and prints ``SEEN`` if
the failure is still there, else ``GONE``. The script has the source of the methods that are called,
of the tiny model, and of the reference, read by ``inspect``. A *cell* is what the walk ran in:
strategy, precision, number of ranks.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template

from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.upstream.drivers.tiny import DECAY, EPOCH_STEPS, GAMMA, LEARNING_RATE
from pytest_distcompat.ext.walk.sequence import Walk
from pytest_distcompat.live_calls import CLIP_VALUE, SLOWER, Calls
from pytest_distcompat.strategies import MAX_NORM

#: The script, but for what depends on the walk: placeholders as ``string.Template`` has them.
_TEMPLATE = Path(__file__).with_name("script.py.tmpl")


def script(cell: Cell, walk: Walk, finding: str) -> str | None:
    """Return a script for torchrun that makes the calls of a walk, and two steps after them.

    The result is None if the driver has no script for the cell's strategy.

    Args:
        cell: The cell of the walk.
        walk: The walk.
        finding: What is wrong with it, the first lines of the script: ``the loss is 0.4; 0.3 in the
            reference``.
    """
    # Lines of code by which the script makes the trainer under this strategy, such as
    # ``fully_shard(model)``. The class of calls has them: strategy -> code.
    built = walk.kind.script.get(cell.strategy)
    if built is None:
        return None
    from pytest_distcompat.ext.upstream.models import modules

    # Two steps more: what a call broke may show only when the trainer steps.
    calls = [*map(str, walk.calls), "step()", "step()"]
    methods = [call.partition("(")[0] for call in calls]
    classes = _classes(walk.kind, methods)
    # The classes of the tiny model ``mlp``, which every walk trains.
    classes.append(inspect.getsource(modules.Block))
    classes.append(inspect.getsource(modules.MLP))
    template = Template(_TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(
        walk=walk,
        finding=finding,
        calls=calls,
        kind=walk.kind.__name__,
        build=textwrap.indent(textwrap.dedent(built).strip(), "    "),
        classes="\n\n".join(classes),
        ranks=cell.world_size,
        rate=LEARNING_RATE,
        decay=DECAY,
        gamma=GAMMA,
        epoch=EPOCH_STEPS,
        max_norm=MAX_NORM,
        clip_value=CLIP_VALUE,
        slower=SLOWER,
    )


def _classes(kind: type[Calls], names: Sequence[str]) -> list[str]:
    """Return the source of the class of calls and of its bases, with only the methods needed.

    They are in the order in which a module defines them: first ``class Calls:``, then ``class
    TorchCalls(Calls):``.

    Args:
        kind: The class of calls, ``TorchCalls``.
        names: The methods that the script calls.
    """
    classes = [base for base in reversed(kind.__mro__) if issubclass(base, Calls)]
    # The template itself calls these, besides the calls of the walk.
    helpers = {"__init__", "outputs", "save", "load"} & set(dir(kind))
    sources_by_class = _method_sources(classes, helpers | set(names))
    texts = []
    for owner in classes:
        base = ""
        if owner is not Calls:
            base = f"({owner.__bases__[0].__name__})"
        sources = sources_by_class[owner.__name__]
        methods = [sources[name] for name in sorted(sources)]
        body = "\n".join(methods) or "    pass\n"
        texts.append(f"class {owner.__name__}{base}:\n{body}")
    return texts


def _method_sources(
    classes: Sequence[type[Calls]], names: Iterable[str]
) -> dict[str, dict[str, str]]:
    """Return the source of these methods, and of those that they call, by class and method.

    Args:
        classes: The classes.
        names: The names of methods.

    Returns:
        Name of a class -> name of a method -> its source.
    """
    sources: dict[str, dict[str, str]] = {}
    for owner in classes:
        sources[owner.__name__] = {}
    unread = list(names)
    while unread:
        name = unread.pop()
        for owner in classes:
            class_sources = sources[owner.__name__]
            if name in vars(owner) and name not in class_sources:
                member = vars(owner)[name]
                # A property's source is that of its function.
                source = inspect.getsource(getattr(member, "fget", member))
                class_sources[name] = source
                # The methods that it calls: ``self.name`` and ``super().name``.
                unread += re.findall(r"(?:self|super\(\))\.(\w+)", source)
    return sources
