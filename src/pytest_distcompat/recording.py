"""What an extension records on the ranks of a suite, beside the snapshots that checks read.

An extension returns the names of functions, ``my_extension:recorder``, from the pytest hook
``pytest_distcompat_recorders``. The names travel to the ranks in the payload of each run. There
``worker`` opens ``recording`` around the whole run. ``ext.reach``, for example, records which lines
of a library each action executes, and writes them into the run's directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol


class Recorder(Protocol):
    """Recorder of an extension on one rank.

    It records from before the driver (the trainer under test) is made until the rank leaves its
    process group.
    """

    def start(self) -> None:
        """Begin, before the first action."""

    def switch(self, action: str) -> None:
        """Note that the rank begins an action, such as ``step``; empty after the last one."""

    def stop(self) -> None:
        """Write what was recorded, also of a rank that fails."""


@dataclass(frozen=True)
class RecordedRank:
    """The rank that a recorder is made for.

    Attributes:
        driver: The driver, as a suite names it.
        cell: The cell whose check needs the run; the run itself may be in another one, as a
            reference is.
        directory: The directory of the run.
        rank: The number of the rank.
    """

    driver: str
    cell: str
    directory: Path
    rank: int


@contextlib.contextmanager
def recording(names: Sequence[str], rank: RecordedRank) -> Iterator[list[Recorder]]:
    """Have recorders record in the block; yield them, so that ``worker`` can call ``switch``.

    Args:
        names: Functions that take a ``RecordedRank`` and return a ``Recorder``, each as
            ``module:function``.
        rank: This rank.
    """
    with contextlib.ExitStack() as stack:
        recorders: list[Recorder] = []
        for name in names:
            recorder: Recorder = resolve_name(name)(rank)
            recorder.start()
            stack.callback(recorder.stop)
            recorders.append(recorder)
        yield recorders
