"""A pytest plugin that runs the cells in a file, in its order.

``-p pytest_distcompat.ext.upstream.selected`` loads it. A line of the file is a driver and a cell,
and the actions that matter: ``accelerate/fsdp2-fp32-w2: save, load``. Of a cell, the checks run
whose runs do one of these actions; without actions all checks run. ``* accelerate/*`` stands for
all cells like this that no line names, and ``- accelerate/ddp-fp32-w2`` names one that does not
run.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.drivers import find_driver
from pytest_distcompat.ext.upstream.changed import SELECTION

#: What a rank does in any run, before its first action and after its last.
_ALWAYS = frozenset({"start", "end"})


@dataclass(frozen=True)
class Chosen:
    """A cell of the file: its place in the order, and the actions that matter; none for all."""

    position: int
    actions: frozenset[str]

    def matters_to(self, case: Any) -> bool:
        """Tell whether a run of the case's check does one of the actions."""
        if not self.actions or self.actions & _ALWAYS:
            return True
        driver = find_driver(case.suite.driver)
        scenario = case.check.runs(case.cell, driver)
        done = set()
        for run in scenario.runs:
            for action in run.actions:
                # A call has its arguments behind its name.
                name, _, _ = action.partition("(")
                done.add(name)
        return bool(self.actions & done)


@dataclass
class Selection:
    """The lines of a file.

    Attributes:
        named: The cells to run, by driver and cell.
        left_out: The cells not to run.
        others: For each pattern of cells that no line names, where they come.
    """

    named: dict[str, Chosen] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    others: dict[str, Chosen] = field(default_factory=dict)

    def chosen(self, cell: str) -> Chosen | None:
        """Return the line by which a cell runs; None if it does not."""
        if cell in self.named:
            return self.named[cell]
        if cell in self.left_out:
            return None
        _, _, without_driver = cell.rpartition("/")
        for pattern, chosen in self.others.items():
            if fnmatch.fnmatchcase(cell, pattern):
                return chosen
            if fnmatch.fnmatchcase(without_driver, pattern):
                return chosen
        return None


def read_selection(path: Path) -> Selection:
    """Return the lines of a file. Raises UsageError if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        problem = error.strerror
        raise pytest.UsageError(f"{SELECTION}: {path}: {problem}") from None
    selection = Selection()
    for position, line in enumerate(lines):
        if not line.strip() or line.startswith("#"):
            continue
        mark, _, rest = line.partition(" ")
        if mark == "*":
            selection.others[rest.strip()] = Chosen(position, frozenset())
        elif mark == "-":
            selection.left_out.add(rest.strip())
        else:
            # A driver may be module:attribute, and a cell has model_hf:gpt2; the actions come after
            # a colon and a blank.
            cell, _, listed = line.partition(": ")
            # "call step" is one action.
            actions = frozenset(listed.strip().split(", ")) - {""}
            selection.named[cell.strip()] = Chosen(position, actions)
    return selection


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the option."""
    text = "Run only the cells in this file, in its order."
    parser.getgroup("distcompat").addoption(
        SELECTION, dest="distcompat_selection", default=None, metavar="FILE", help=text
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the hook that selects, if a file is given."""
    path = config.getoption("distcompat_selection", None)
    if path:
        # A hook that is registered last is the outermost: the order of a budget comes before.
        config.pluginmanager.register(Selected(read_selection(Path(path))), "distcompat-selected")


class Selected:
    """Deselects what is not in the file, and sorts the others."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None]:
        """Select after all other plugins have."""
        yield
        positions: dict[pytest.Item, int] = {}
        others: list[pytest.Item] = []
        for item in items:
            chosen = self._chosen(item)
            if chosen is None:
                others.append(item)
            else:
                positions[item] = chosen.position
        if others:
            config.hook.pytest_deselected(items=others)
        items[:] = sorted(positions, key=lambda item: positions[item])

    def _chosen(self, item: pytest.Item) -> Chosen | None:
        """Return the line of the file by which an item runs; None if it does not."""
        if not hasattr(item, "callspec"):
            return None
        case: Any = item.callspec.params.get("distcompat_case")
        # That of a suite without selected cells has none.
        if not hasattr(case, "cell"):
            return None
        cell = f"{case.suite.driver}/{case.cell.id}"
        chosen = self.selection.chosen(cell)
        if chosen is None or not chosen.matters_to(case):
            return None
        return chosen
