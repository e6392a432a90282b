"""How much a reader must hold in the head at once: what a line of code contains, by package.

``python benchmarks/density.py [DIRECTORY ...]`` prints a Markdown table; by default of this package, as a whole and by
subpackage. A code line is one that has a token other than a comment or a docstring. Nodes a line depend on how long the
lines are, nodes a statement do not. Annotations of types count in both. To compare, give directories of others, as ``python benchmarks/density.py $(python -c 'import _pytest; print(*_pytest.__path__)')``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: Names that say nothing of what they hold.
EMPTY_NAMES = {"one", "found"}


@dataclass
class Density:
    """What the code of some files contains, in absolute numbers."""

    code_lines: int = 0
    nodes: int = 0
    statements: int = 0
    nodes_of_annotations: int = 0
    comprehensions: int = 0
    conditional_expressions: int = 0
    empty_names: int = 0

    def add(self, path: Path) -> None:
        """Count a file."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = set(map(id, docstring_expressions(tree)))
        lines = set()
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            self.nodes += 1
            if isinstance(node, ast.expr | ast.stmt):
                lines.add(node.lineno)
            if isinstance(node, ast.stmt):
                self.statements += 1
            for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                if annotation is not None:
                    self.nodes_of_annotations += len(list(ast.walk(annotation)))
            if isinstance(node, COMPREHENSIONS):
                self.comprehensions += 1
            if isinstance(node, ast.IfExp):
                self.conditional_expressions += 1
            if isinstance(node, ast.Name) and node.id in EMPTY_NAMES:
                self.empty_names += 1
        self.code_lines += len(lines)

    def row(self, name: str) -> str:
        """Return a row of the table."""
        thousands = self.code_lines / 1000
        cells = (
            name,
            f"{self.code_lines}",
            f"{self.nodes / self.code_lines:.1f}",
            f"{(self.nodes - self.nodes_of_annotations) / self.code_lines:.1f}",
            f"{self.nodes / self.statements:.1f}",
            f"{self.comprehensions / thousands:.0f}",
            f"{self.conditional_expressions / thousands:.0f}",
            f"{self.empty_names}",
        )
        return f"| {' | '.join(cells)} |"


def docstring_expressions(tree: ast.Module) -> Iterable[ast.AST]:
    """Yield the statements and constants that are docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first
                yield first.value


def density_of(files: Iterable[Path]) -> Density:
    """Return the density of these files together."""
    density = Density()
    for path in files:
        density.add(path)
    return density


def main() -> None:
    """Print the table."""
    directories = [Path(argument) for argument in sys.argv[1:]]
    if not directories:
        package = Path(__file__).resolve().parents[1] / "src" / "pytest_distcompat"
        directories = [package]
        for directory in sorted(package.iterdir()):
            if (directory / "__init__.py").exists():
                directories.append(directory)
    columns = (
        "files",
        "code lines",
        "nodes a line",
        "without annotations",
        "nodes a statement",
        "comprehensions / 1000",
        "conditional expressions / 1000",
        "`one`, `found`",
    )
    print(f"| {' | '.join(columns)} |")
    print(f"|{' --- |' * len(columns)}")
    for directory in directories:
        density = density_of(sorted(directory.rglob("*.py")))
        if density.code_lines:
            print(density.row(directory.name))


if __name__ == "__main__":
    main()
