"""A pytest plugin that runs the cells in a file, in its order.

``distcompat releases --changed`` starts pytest with it, to run only the tests that execute what a
new release of a library changes: ``pytest -p pytest_distcompat.ext.upstream.selected
--distcompat-selection=FILE``. ``distcompat reach --select`` has written the file.

The tests are items of suites, one for each check of each cell. A cell is one configuration of the
trainer under test (``fsdp2-fp32-w2``); its driver is the class by which it is tested
(``accelerate``). A check reads runs, in which ranks do actions: ``build``, ``step``, ``save`` ...

The lines of the file:

- ``accelerate/fsdp2-fp32-w2: save, load``: driver, cell, and the actions that execute changed
  code. Of this cell those checks run whose runs do one of these actions.
- ``accelerate/fsdp2-fp32-w2``: all checks of this cell run.
- ``* accelerate/*``: all cells like this run that no line names; cells that only the new release
  can run, for example.
- ``- accelerate/ddp-fp32-w2``: this cell does not run, although a ``*`` would take it.
- ``# ...``: a comment.
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

#: What a rank does in any run, before its first action and after its last. Changed code that is
#: executed there concerns all checks.
_ALWAYS = frozenset({"start", "end"})


@dataclass(frozen=True)
class Chosen:
    """A line of the file that has cells run: its place in the order, and the actions that matter.

    Attributes:
        position: The number of the line; items are run in the order of these numbers.
        actions: Such as ``{"save", "load"}``; empty if all checks run.
    """

    position: int
    actions: frozenset[str]

    def matters_to(self, case: Any) -> bool:
        """Tell whether a run of the case's check does one of the actions.

        Args:
            case: A ``plugin.suite.cases.Case``: a suite, a cell and a check.
        """
        if not self.actions or self.actions & _ALWAYS:
            return True
        driver = find_driver(case.suite.driver)
        scenario = case.check.runs(case.cell, driver)
        done = set()
        for run in scenario.runs:
            for action in run.actions:
                # A call has its arguments behind its name: ``call step(clip='value')``.
                name, _, _ = action.partition("(")
                done.add(name)
        return bool(self.actions & done)


@dataclass
class Selection:
    """The lines of a file.

    Attributes:
        named: Driver and cell (``accelerate/fsdp2-fp32-w2``) -> the line that has it run.
        left_out: Driver and cell of those that do not run.
        others: Pattern behind ``*`` (``accelerate/*``) -> that line.
    """

    named: dict[str, Chosen] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    others: dict[str, Chosen] = field(default_factory=dict)

    def chosen(self, cell: str) -> Chosen | None:
        """Return the line by which a cell runs; None if it does not.

        Args:
            cell: Driver and cell: ``accelerate/fsdp2-fp32-w2``. A pattern may be for both, or for
                the cell alone (``fsdp2-*``).
        """
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
            # A driver may be ``module:attribute``, and a cell may have ``model_hf:gpt2``: only a
            # colon with a space behind it is followed by the actions.
            cell, _, listed = line.partition(": ")
            # Split at commas alone: "call step" is one action. Without actions the text is empty.
            actions = frozenset(listed.strip().split(", ")) - {""}
            selection.named[cell.strip()] = Chosen(position, actions)
    return selection


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the option ``--distcompat-selection``. pytest calls it when it loads the plugin."""
    text = "Run only the cells in this file, in its order."
    parser.getgroup("distcompat").addoption(
        SELECTION, dest="distcompat_selection", default=None, metavar="FILE", help=text
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the hook that selects, if a file is given."""
    path = config.getoption("distcompat_selection", None)
    if path:
        # A hook that is registered last is the outermost. So it runs after ``plugin.suite.order``
        # has sorted items for ``--distcompat-budget``, and its own order counts.
        config.pluginmanager.register(Selected(read_selection(Path(path))), "distcompat-selected")


class Selected:
    """Hook of pytest that deselects what is not in the file, and sorts the others."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None]:
        """Select after all other plugins have, and report the rest to pytest as deselected."""
        # All other hooks run here.
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
            # It is a test without parameters, of the user's own.
            return None
        case: Any = item.callspec.params.get("distcompat_case")
        if not hasattr(case, "cell"):
            # It is a user's test with other parameters, whose case is None, or the only item of a
            # suite of which no cell is selected.
            return None
        cell = f"{case.suite.driver}/{case.cell.id}"
        chosen = self.selection.chosen(cell)
        if chosen is None or not chosen.matters_to(case):
            return None
        return chosen
