"""Report: the results of a session as one document, from which every format is made, and its JSON.

``schema.json`` beside this file describes the JSON; docs/reports.md explains it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.decode import decode
from pytest_distcompat.excerpt import excerpt
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report.result import Row
from pytest_distcompat.status import Status, Verdict

#: The format of the JSON: raised when a key changes its meaning or is removed. New keys may be added at any time.
FORMAT = 2

#: How a session ended, from bad to good.
ENDINGS = ("internal error", "interrupted", "stopped", "finished")

#: The longest message of a verdict, in characters: the full text of a failed run is stored once, with the run.
MAX_MESSAGE = 2500

#: The deepest nesting of a document. A report has six levels.
MAX_DEPTH = 50

#: Types of the schema: those of Python, and their names in messages.
_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "a text"),
    "integer": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
    "boolean": ((bool,), "true or false"),
    "null": ((type(None),), "null"),
    "array": ((list,), "a list"),
    "object": ((dict,), "an object"),
}


@dataclass
class Report:
    """Results of one session, or of several merged.

    ``session``: versions, device, settings, how the session ended. ``runs``: the process groups (``evidence.store``).
    ``unreached``: the node ids of the items that were collected and never ran.
    """

    session: dict[str, Any] = field(default_factory=dict)
    results: list[Verdict] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        """Tell whether the session ended early."""
        return bool(self.session.get("ending", "finished") != "finished")

    def fill_drivers(self) -> None:
        """Give each verdict and row the driver of its suite: an item that failed outside its check does not know it."""
        drivers = {(row.suite, row.place): row.driver for row in self.rows if row.driver}
        for row in self.rows:
            row.driver = row.driver or drivers.get((row.suite, row.place), "")
        self.results = [
            dataclasses.replace(one, driver=one.driver or drivers.get((one.suite, one.place), ""))
            for one in self.results
        ]

    def pieces(self) -> Iterator[str]:
        """Yield the JSON, a result, cell or run at a time; each has a line, so that it can be searched and compared."""
        yield f'{{\n "format": {FORMAT},\n "session": {_compact({**self.session, "counts": counts(self)})}'
        lists: dict[str, Iterable[Any]] = {
            "results": map(_result, self.results),
            "cells": ({**vars(row), "facets": facets(row.cell)} for row in self.rows),
            "runs": self.runs,
            "unreached": self.unreached,
        }
        for name, items in lists.items():
            yield f',\n "{name}": '
            yield from _listed(items)
        yield "\n}\n"

    def to_text(self) -> str:
        """Return the JSON as a text."""
        return "".join(self.pieces())

    @classmethod
    def from_json(cls, data: Any) -> Report:
        """Return the report that ``to_text`` wrote. Unknown keys are ignored.

        Raises:
            UsageProblem: The data is no report.
        """
        if not isinstance(data, Mapping) or "format" not in data:
            raise UsageProblem("is no report of pytest-distcompat")
        if data["format"] != FORMAT:
            raise UsageProblem(f"format {data['format']!r} is not known here; expected {FORMAT}")
        if _too_deep(data):
            raise UsageProblem(f"is no report: more than {MAX_DEPTH} objects and lists are inside one another")
        for problem in _problems(_schema(), data):
            raise UsageProblem(f"is no report: {problem}")
        results = [decode(Verdict, one) for one in data["results"]]
        rows = [decode(Row, one) for one in data.get("cells", ())]
        return cls(data["session"], results, rows, list(data.get("runs", ())), list(data.get("unreached", ())))

    @classmethod
    def read(cls, path: Path) -> Report:
        """Return the report in a JSON file. Raises UsageProblem if there is none."""
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise UsageProblem(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise UsageProblem(f"{path}: {error}") from None
        except RecursionError:
            raise UsageProblem(f"{path}: is no report: too many objects and lists are inside one another") from None


def counts(report: Report) -> dict[str, int]:
    """Count the verdicts that were selected, that ran and that were not reached; and those of each status.

    ``ran`` shows a suite that stops running: it is ``selected`` without what was skipped and what was not reached.
    """
    found = Counter(result.status for result in report.results)
    selected = len(report.results) + len(report.unreached)
    by_status = {status.value: found[status] for status in Status}
    ran = len(report.results) - found[Status.SKIPPED]
    red = sum(result.red for result in report.results)
    return {"selected": selected, "ran": ran, "unreached": len(report.unreached), "red": red, **by_status}


@functools.cache
def facets(cell: str) -> Mapping[str, Any]:
    """Return strategy, precision, world size, nodes and options of a cell id; nothing for any other text."""
    try:
        found = Cell.parse(cell)
    except ValueError:
        return {}
    fixed = {"strategy": found.strategy, "precision": found.precision, "world_size": found.world_size}
    return fixed | ({"nodes": found.nodes} if found.nodes > 1 else {}) | dict(found.options)


def _result(result: Verdict) -> dict[str, Any]:
    texts = {"message": excerpt(result.message, MAX_MESSAGE), "facets": facets(result.cell)}
    return {**result.to_json(), **texts, "seconds": round(result.seconds, 3), "began": round(result.began, 3)}


def _too_deep(data: Any) -> bool:
    """Tell whether the JSON is nested deeper than any report, and too deep for recursive functions."""
    level = [data]
    for _ in range(MAX_DEPTH):
        parts = (one for part in level for one in (part.values() if isinstance(part, Mapping) else part))
        level = [one for one in parts if isinstance(one, (Mapping, list))]
        if not level:
            return False
    return True


@functools.cache
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    return schema


def _problems(schema: Mapping[str, Any], data: Any, where: str = "") -> Iterator[str]:
    """Yield what in the JSON is not as the schema has it, so that it cannot be read."""
    if "$ref" in schema:
        schema = _schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    names = schema.get("type", "string" if "enum" in schema else ())
    types = [_TYPES[name] for name in ([names] if isinstance(names, str) else names)]
    # Not isinstance: in Python a bool is an int, in a report it is not.
    if types and not any(type(data) in kinds for kinds, _ in types):
        expected = " or ".join(words for _, words in types if words != "null")
        yield f"{where or 'it'} is {_shown(data)}; expected {expected}"
    elif "closed" in schema and data not in schema["enum"]:
        yield f"{where} is {_shown(data)}; expected one of {', '.join(schema['enum'])}"
    elif isinstance(data, dict):
        missing = (name for name in schema.get("needed", ()) if name not in data)
        yield from (f"{name!r} is missing{where and f' in {where}'}" for name in missing)
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, value in data.items():
            if part := known.get(name, others):
                yield from _problems(part, value, f"{where}.{name}".lstrip("."))
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield from _problems(schema["items"], value, f"{where}[{number}]")


def _shown(data: Any) -> str:
    """Return a value in a few words."""
    if isinstance(data, (dict, list)):
        return "an object" if isinstance(data, dict) else "a list"
    return "null" if data is None else ascii(data)[:60]


def _listed(items: Iterable[Any]) -> Iterator[str]:
    before, after = "[\n  ", "[]"
    for one in items:
        yield before + _compact(one)
        before, after = ",\n  ", "\n ]"
    yield after


def _compact(value: Any) -> str:
    return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    """Return the value with None for numbers that JSON does not have, which browsers refuse to read."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
