"""Script that shows a walk without this plugin: the methods that are called, the model and the reference, as they stand here."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from string import Template

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers._calls import CLIP_VALUE, SLOWER, Calls
from pytest_distcompat.drivers._tiny import DECAY, EPOCH_STEPS, GAMMA, LEARNING_RATE
from pytest_distcompat.strategies._base import MAX_NORM
from pytest_distcompat.walk.sequence import Walk

#: The script, but for what depends on the walk: placeholders as ``string.Template`` has them.
_TEMPLATE = Path(__file__).with_name("script.py.tmpl")


def script(cell: Cell, walk: Walk, finding: str) -> str | None:
    """Return a script for torchrun that does the calls of a walk, and two steps after them; None if the driver has none."""
    built = walk.kind.script.get(cell.strategy)
    if built is None:
        return None
    from pytest_distcompat.models import _modules

    calls = [*map(str, walk.calls), *["step()"] * 2]
    model = map(inspect.getsource, (_modules.Block, _modules.MLP))
    classes = (*_classes(walk.kind, [call.partition("(")[0] for call in calls]), *model)
    numbers = {"max_norm": MAX_NORM, "clip_value": CLIP_VALUE, "slower": SLOWER, "epoch": EPOCH_STEPS}
    numbers |= {"ranks": cell.world_size, "rate": LEARNING_RATE, "decay": DECAY, "gamma": GAMMA}
    build = textwrap.indent(textwrap.dedent(built).strip(), "    ")
    texts = {"walk": walk, "finding": finding, "calls": calls, "kind": walk.kind.__name__, "build": build}
    template = Template(_TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(numbers | texts, classes="\n\n".join(classes))


def _classes(kind: type[Calls], names: Sequence[str]) -> list[str]:
    """Return the source of the classes, with no more methods than the calls need."""
    classes = [one for one in reversed(kind.__mro__) if issubclass(one, Calls)]
    needed = {"__init__", "outputs", "save", "load"} & set(dir(kind)) | set(names)
    sources: dict[tuple[str, str], str] = {}
    while new := [
        (one, name) for one in classes for name in needed if name in vars(one) and (one.__name__, name) not in sources
    ]:
        for one, name in new:
            member = vars(one)[name]
            source = inspect.getsource(getattr(member, "fget", member))
            sources[one.__name__, name] = source
            needed |= set(re.findall(r"(?:self|super\(\))\.(\w+)", source))
    texts = []
    for one in classes:
        base = "" if one is Calls else f"({one.__bases__[0].__name__})"
        methods = [source for (owner, _), source in sorted(sources.items()) if owner == one.__name__]
        texts.append(f"class {one.__name__}{base}:\n" + "\n".join(methods or ["    pass\n"]))
    return texts
