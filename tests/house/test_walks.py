"""The walks of docs/architecture.md name functions that stand where it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "pytest_distcompat"
#: A line of a walk: its number, a file, a function in it.
STEP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`:", re.MULTILINE)


def steps() -> list[tuple[str, str]]:
    """Return the files and functions of all walks, each once."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, _, walks = page.partition("\n## Three walks\n")
    walks, _, _ = walks.partition("\n## ")
    return list(dict.fromkeys(STEP.findall(walks)))


def functions_of(path: Path) -> set[str]:
    """Return the names of the functions of a module, and of its methods after their class."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.update(f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef))
    return names


def test_there_are_three_walks() -> None:
    assert len(steps()) > 20


@pytest.mark.parametrize(("file", "function"), steps())
def test_a_function_of_a_walk_stands_in_its_file(file: str, function: str) -> None:
    assert function in functions_of(PACKAGE / file)
