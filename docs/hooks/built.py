# ruff: noqa: INP001 - mkdocs loads it by its path
"""For mkdocs: put a list of the repository in the place of ``<!-- on the site: NAME -->``."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

PLACE = re.compile(r"^<!-- on the site: (\w+) -->$", re.MULTILINE)
#: The table of the checks leads to their sources, where the sections of the site are not.
CHECK = re.compile(r"\[`(\w+)`\]\(\.\./src/pytest_distcompat/checks/\w+\.py\)")
ROOT = Path(__file__).parents[2]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with its lists."""
    if not PLACE.search(markdown):
        return markdown
    sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tests")) if path not in sys.path]
    built = importlib.import_module("tests.cli.generated").BUILT
    return PLACE.sub(lambda found: built[found[1]](), CHECK.sub(r"[`\1`](#\1)", markdown))
