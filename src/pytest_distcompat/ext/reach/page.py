"""A map as a page of HTML, without network access, scripts or further files."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from pytest_distcompat.ext.reach.map import BranchReach, Counts, FileReach, ReachMap
from pytest_distcompat.ext.reach.text import (
    ORDER,
    cells_text,
    counts_of,
    headline,
    titled,
    unreached,
)
from pytest_distcompat.report.html import POLICY


@dataclass(frozen=True)
class LibraryPart:
    """The part of the page about a library."""

    name: str
    title: str
    counts: Counts
    missing: tuple[BranchReach, ...]
    files: tuple[FileReach, ...]


def page(found: ReachMap) -> str:
    """Return the page. Everything from a source file is text, which jinja2 escapes."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = resources.files("pytest_distcompat.ext.reach") / "templates" / "reach.html.j2"
    style = resources.files("pytest_distcompat.report") / "templates" / "page.css"
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        policy=POLICY,
        style=Markup(style.read_text(encoding="utf-8")),  # noqa: S704 - a file of this package
        headline=headline(found),
        versions=found.versions,
        libraries=[_part(found, library) for library in found.libraries()],
        order=ORDER,
        cells=cells_text,
    )


def _part(found: ReachMap, library: str) -> LibraryPart:
    missing = sorted(unreached(found, [library]), key=lambda one: one.order)
    files = [found.coverage_of(file_id) for file_id in found.files if file_id.library == library]
    return LibraryPart(
        library, titled(found, library), counts_of(found, library), tuple(missing), tuple(files)
    )
