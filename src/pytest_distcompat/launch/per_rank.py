"""Who asks, while it is imported, which rank it is on: a fork server is none, and ranks forked from it inherit the answer.

``RANK = int(os.environ.get("RANK", 0))`` at the top of a trainer's module is 0 on all ranks then, and all they do passes as the
work of one. https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

import contextlib
import inspect
import os
import site
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

#: What torchrun tells each rank of itself.
NAMES = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"})

#: Whose modules may: installed libraries are imported before there is a rank everywhere (``mp.spawn``), and ask again.
_INSTALLED = tuple(
    str(Path(path).resolve()) + os.sep
    for path in (
        *(str(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        str(Path(__file__).parents[1]),
    )
)


@contextlib.contextmanager
def asked_at_import() -> Iterator[list[str]]:
    """What other modules ask of NAMES while they are imported in the block, a sentence for each."""
    found: list[str] = []
    environ: Any = os.environ
    ordinary = type(environ)
    outside = set(_outwards(inspect.currentframe()))

    def look_up(self: Any, key: str) -> str:
        place = _importing(inspect.currentframe(), outside) if key in NAMES else ""
        if place:
            found.append(f"{place} asks for {key} when it is imported, which only ranks know")
        value: str = ordinary.__getitem__(self, key)
        return value

    environ.__class__ = type(ordinary.__name__, (ordinary,), {"__getitem__": look_up})
    try:
        yield found
    finally:
        environ.__class__ = ordinary


def _importing(frame: FrameType | None, outside: set[FrameType]) -> str:
    """Where in a module that is being imported, if one is, and if it is not an installed one; else nothing."""
    for one in _outwards(frame):
        code = one.f_code
        # Who only sees to it that there is a value holds none.
        if one in outside or (code.co_name == "setdefault" and one.f_globals.get("__name__") == "os"):
            break
        if code.co_name == "<module>":
            path = Path(code.co_filename)
            own = path.is_file() and not str(path.resolve()).startswith(_INSTALLED)
            return f"{path}:{one.f_lineno}" if own else ""
    return ""


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
