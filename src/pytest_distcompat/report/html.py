"""HTML report: one page without network access or further files."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import Any

from pytest_distcompat.report.causes import causes
from pytest_distcompat.report.document import Report, facets
from pytest_distcompat.report.markdown import headline
from pytest_distcompat.report.result import Result, Table, by_suite
from pytest_distcompat.report.text import counts_text
from pytest_distcompat.status import Status

#: The page may load nothing. Its own script sets bars and colours.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_TEMPLATES = resources.files("pytest_distcompat.report") / "templates"


def html(report: Report) -> str:
    """Return the page.

    Everything from a test is text: jinja2 escapes it, and the script sets it as text. The policy in the head lets the browser
    run the page's own script, by its hash, and load nothing.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = _read("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = report.to_json()
    return environment.from_string(_read("page.html.j2")).render(
        policy=f"{POLICY}; script-src 'sha256-{digest}'",
        style=Markup(_read("page.css")),  # noqa: S704 - a file of this package
        script=Markup(script),  # noqa: S704 - a file of this package
        data=data,
        session=data["session"],
        headline=headline(report),
        counts=counts_text(report),
        interrupted=report.interrupted,
        unreached=len(report.unreached),
        suites=[_suite(found) for found in by_suite(report.results)],
        causes=causes(report.results),
        not_applicable=[row for row in report.rows if row.not_applicable],
        statuses=list(Status),
        facets=_axes(report.results),
        place=place,
    )


def place(result: Result) -> str:
    """Return the key by which the page's script finds a verdict: its place and its check."""
    return f"{result.place}:{result.cell}:{result.check}"


def _suite(found: list[Result]) -> dict[str, Any]:
    return {
        "title": f"{found[0].suite} (driver {found[0].driver})",
        "place": found[0].place,
        "driver": found[0].driver,
        "table": Table.of(found),
    }


def _axes(results: list[Result]) -> dict[str, list[str]]:
    """Return the values of each filter, in the order of their appearance."""
    known = [facets(result.cell) for result in results]
    return {
        "driver": list(dict.fromkeys(result.driver for result in results)),
        "strategy": list(dict.fromkeys(str(one["strategy"]) for one in known if one)),
        "precision": list(dict.fromkeys(str(one["precision"]) for one in known if one)),
        "check": list(dict.fromkeys(result.check for result in results)),
    }


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")
