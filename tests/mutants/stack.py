"""A stack to judge cells on: the installed one, or one with a mutated copy in front."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.engine import run_check
from pytest_distcompat.judge import skipped
from pytest_distcompat.known import applying, names_in_issues, shipped
from pytest_distcompat.launch.request import Warmth
from pytest_distcompat.launch.torchrun import LAUNCHERS
from pytest_distcompat.models import model_of
from pytest_distcompat.runner import Runner
from pytest_distcompat.status import Verdict


@dataclass(frozen=True)
class Stack:
    """Runs cells as the suite does: the same runs, checks and known issues."""

    runner: Runner

    def verdict(self, driver: str, cell_id: str, check: str) -> Verdict:
        """Return the built-in suite's verdict of that check in that cell."""
        cell, kind, wanted = Cell.parse(cell_id), find_driver(driver), CHECKS.get(check)
        reason = kind.unsupported_reason(cell, "cpu") or wanted.not_applicable(cell, kind)
        if reason:
            return skipped(check, cell, reason)
        return run_check(self.runner, driver, cell, wanted, applying(shipped(), names_in_issues(kind), "cpu"))[0]


@contextlib.contextmanager
def stack(store: Path, path: tuple[Path, ...], cells: tuple[tuple[str, str], ...]) -> Iterator[Stack]:
    """A stack with these directories in front of all others. ``cells`` (driver, cell) say what its ranks will import."""
    modules = ["torch", "torch.distributed"]
    for driver, cell in cells:
        modules += [*find_driver(driver).preload, *model_of(Cell.parse(cell)).preload]
    tests = str(Path(__file__).parents[1])
    front = [*(str(directory) for directory in path), os.environ.get("PYTHONPATH", ""), tests]
    with pytest.MonkeyPatch.context() as patch:
        # Before the launcher starts: it hands its own path on to the fork server, and that to the ranks.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, front)))
        patch.setenv("HF_HUB_OFFLINE", "1")
        for directory in reversed(path):
            patch.syspath_prepend(str(directory))
        launcher = LAUNCHERS["warm"](Warmth(tuple(dict.fromkeys(modules))))
        try:
            yield Stack(Runner(store, launcher, device="cpu", timeout=120))
        finally:
            launcher.close()
