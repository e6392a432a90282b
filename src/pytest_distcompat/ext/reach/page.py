"""A map as a page of HTML, without network access, scripts or further files.

``distcompat reach MAP --html PAGE`` (``command``) writes what ``page`` returns. A *map* says which
test cells execute which functions and branches of the libraries. The page's layout is in
``templates/reach.html.j2``.
"""

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
    """The part of the page about a library; the template reads these fields."""

    #: Such as ``accelerate``.
    name: str
    #: The name with the release.
    title: str
    #: How many functions and branches there are, and how many some cell reaches.
    counts: Counts
    #: The branches that no cell reaches, those first that users are likely to run into.
    missing: tuple[BranchReach, ...]
    #: Each source file, with the cells that execute its functions and branches.
    files: tuple[FileReach, ...]


def page(reach_map: ReachMap) -> str:
    """Return the page. Everything from a source file is text, which jinja2 escapes."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template_path = resources.files("pytest_distcompat.ext.reach") / "templates" / "reach.html.j2"
    style_path = resources.files("pytest_distcompat.report") / "templates" / "page.css"
    template = environment.from_string(template_path.read_text(encoding="utf-8"))
    style = style_path.read_text(encoding="utf-8")
    libraries = [_part(reach_map, library) for library in reach_map.libraries()]
    return template.render(
        # The Content-Security-Policy, by which the page may load nothing.
        policy=POLICY,
        style=Markup(style),  # noqa: S704 - a file of this package
        headline=headline(reach_map),
        versions=reach_map.versions,
        libraries=libraries,
        # The words that say in which order a library's missing branches are.
        order=ORDER,
        # The template calls it for the cells of a branch: ``3 cells in build step: ...``.
        cells=cells_text,
    )


def _part(reach_map: ReachMap, library: str) -> LibraryPart:
    """Return the part about the library of that name."""
    missing = sorted(unreached(reach_map, [library]), key=lambda branch_reach: branch_reach.order)
    return LibraryPart(
        name=library,
        title=titled(reach_map, library),
        counts=counts_of(reach_map, library),
        missing=tuple(missing),
        files=tuple(reach_map.coverage_of_library(library)),
    )
