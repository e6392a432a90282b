"""Each fault in docs/scripts.md names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "scripts.md"


def test_each_fault_has_its_test() -> None:
    rows = re.findall(r"^\|.*\| `(test_\w+\.py)::(test_\w+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 10
    for file, name in rows:
        tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{file}::{name}"
