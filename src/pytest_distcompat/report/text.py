"""The matrix for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_distcompat.report.result import Result, Row, blank_reasons, by_suite, table


def matrix_text(results: Iterable[Result], cells: Iterable[Row] = ()) -> Iterator[str]:
    """Lines: each suite's matrix, then the reason of everything that is known or was not run, each once."""
    extra = list(cells)
    for found in by_suite(results):
        header, rows = table(found)
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        yield f"{found[0].suite} (driver {found[0].driver})"
        for line in (header, *rows):
            yield "  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for status, title in (("known", "known"), ("skipped", "not run"), ("refused", "refused")):
            for reason, names in _reasons(found, status).items():
                yield f"  {title}: {reason} [{_short(names)}]"
        here = (row for row in extra if row.suite == found[0].suite and row.driver == found[0].driver)
        for (check, reason), names in blank_reasons(here).items():
            yield f"  blank: {check}: {reason} [{_short(names)}]"


def _reasons(results: Iterable[Result], status: str) -> dict[str, list[str]]:
    """Reason to the cells (and checks) that have it."""
    found: dict[str, list[str]] = {}
    for result in results:
        if result.status == status:
            name = result.cell if status == "skipped" else f"{result.cell}:{result.check}"
            names = found.setdefault(result.why, [])
            if name not in names:
                names.append(name)
    return found


def _short(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
