# ruff: noqa: INP001 - mkdocs loads it by its path
"""For mkdocs: on the site, a link that leads out of docs/ leads to the repository on GitHub."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page with such links replaced. A link to nothing stays; mkdocs warns of it."""
    docs = Path(config["docs_dir"])
    here = posixpath.dirname(page.file.src_uri)

    def outward(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", here, found[1]))
        path = docs.parent / target
        if not path.exists() or (target.startswith("docs/") and path.is_file()):
            return found[0]
        kind = "tree" if path.is_dir() else "blob"
        return f"{config['repo_url']}/{kind}/main/{target}"

    return LINK.sub(outward, markdown)
