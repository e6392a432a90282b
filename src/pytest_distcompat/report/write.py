"""The report file: JSON for machines, Markdown for people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_distcompat.report.result import Result, Row, blank_reasons, by_suite, table

#: Raised when a key changes its meaning or goes away; new keys may come at any time.
FORMAT = 1


def _json(results: Iterable[Result], run: Mapping[str, Any], rows: Iterable[Row]) -> str:
    data = {
        "format": FORMAT,
        "run": dict(run),
        "results": [dataclasses.asdict(result) for result in results],
        "cells": [dataclasses.asdict(row) for row in rows],
    }
    return json.dumps(data, indent=1) + "\n"


def _markdown(results: Iterable[Result], run: Mapping[str, Any], rows: Iterable[Row]) -> str:
    cells = list(rows)
    return "\n".join([*_markdown_lines(list(results), run), *_markdown_blanks(cells), *_markdown_cost(cells)]) + "\n"


def _markdown_blanks(rows: list[Row]) -> Iterator[str]:
    """Why a check has nothing to say in a cell: a line a reason."""
    if any(row.blanks for row in rows):
        yield from ("", "## Blanks", "")
    for driver in dict.fromkeys(row.driver for row in rows):
        for (check, reason), names in blank_reasons(row for row in rows if row.driver == driver).items():
            yield f"- {driver}: {check}: {reason} ({len(names)} cells: {', '.join(names)})"


def _markdown_cost(rows: list[Row]) -> Iterator[str]:
    costs = [row for row in rows if row.cost]
    if not costs:
        return
    yield ""
    yield "## Cost"
    yield ""
    yield "| driver | cell | step, ms | tokens/s a rank | bytes of master and state a parameter | peak memory, MiB |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in costs:
        cost = row.cost
        numbers = f"{1000 * cost['step_seconds']:.1f} | {cost['tokens_per_second']:.0f} | {cost['state_bytes']:.1f}"
        yield f"| {row.driver} | {row.cell} | {numbers} | {cost['memory'] / 2**20:.0f} |"


def _markdown_lines(results: list[Result], run: Mapping[str, Any]) -> Iterator[str]:
    yield "# Distributed compatibility"
    yield ""
    versions = ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())
    yield f"{len(results)} results, {run.get('lives', 0)} process-group lives, device {run.get('device', '?')}; {versions}"
    for found in by_suite(results):
        header, rows = table(found)
        yield ""
        yield f"## {found[0].suite} (driver {found[0].driver})"
        yield ""
        yield "| " + " | ".join(header) + " |"
        yield "|" + " --- |" * len(header)
        for row in rows:
            yield "| " + " | ".join(row) + " |"
        reasons = [result for result in found if result.status != "passed"]
        if reasons:
            yield ""
        yield from dict.fromkeys(f"- {r.cell}:{r.check}: {r.word}: {r.why}" for r in reasons)


#: Suffix of the file to what writes it.
FORMATS: dict[str, Callable[[Iterable[Result], Mapping[str, Any], Iterable[Row]], str]] = {
    ".json": _json,
    ".md": _markdown,
}


def write_report(path: Path, results: Iterable[Result], run: Mapping[str, Any], rows: Iterable[Row] = ()) -> None:
    """Write the file in the format of its suffix. Raises KeyError for a suffix that is not in FORMATS."""
    path.write_text(FORMATS[path.suffix](results, run, rows), encoding="utf-8")
