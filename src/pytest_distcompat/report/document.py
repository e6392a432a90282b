"""Report: the results of a session as one document, and its JSON.

At the end of a session ``plugin.reporting.results`` makes a ``Report``. Everything else is made
from it: the section in pytest's terminal, and files in JSON, HTML, Markdown and plain text. The
commands ``distcompat diff``, ``merge``, ``report`` and ``trend`` read the JSON of earlier sessions
again, by ``Report.read``. ``schema.json`` beside this file describes the JSON; docs/reports.md
explains it.

A report is about suites: each has a *verdict* (passed, failed, ...) on each *check* in each *cell*.
A cell is a configuration of the trainer, with an id such as ``fsdp2-fp32-w2-compile``; its *facets*
are strategy, precision, world size and options, here ``{"strategy": "fsdp2", "precision": "fp32",
"world_size": 2, "compile": True}``. A *run* is one process group from start to end. A *driver* is
the trainer under test.
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
from pytest_distcompat.status import ADDED_STATUSES, Status, Verdict, all_statuses

#: The format of the JSON: raised when a key changes its meaning or is removed. New keys may be
#: added at any time.
FORMAT = 2

#: How a session ended, from bad to good: the values of ``session["ending"]``.
ENDINGS = ("internal error", "interrupted", "stopped", "finished")

#: The longest message of a verdict, in characters: the full text of a failed run is stored once,
#: with the run.
MAX_MESSAGE = 2500

#: The deepest nesting of a document. A report has six levels.
MAX_DEPTH = 50


#: The JSON schema of a document, or of a part of it.
_Schema = Mapping[str, Any]


@dataclass(frozen=True)
class _SchemaType:
    """A type of the schema."""

    #: The types of Python that the JSON is read as.
    python_types: tuple[type, ...]
    #: The name of the type in messages.
    label: str


#: The types by the names that JSON schema has for them.
_SCHEMA_TYPES: Mapping[str, _SchemaType] = {
    "string": _SchemaType((str,), "a text"),
    "integer": _SchemaType((int,), "a whole number"),
    "number": _SchemaType((int, float), "a number"),
    "boolean": _SchemaType((bool,), "true or false"),
    "null": _SchemaType((type(None),), "null"),
    "array": _SchemaType((list,), "a list"),
    "object": _SchemaType((dict,), "an object"),
}


@dataclass
class Report:
    """Results of one session, or of several merged.

    Attributes:
        session: Versions, device, settings, times, and how the session ended; see
            ``plugin.reporting.session_info`` and ``schema.json``.
        results: The verdicts.
        rows: What is known about each cell besides its verdicts, as its cost.
        runs: The process groups, as ``evidence.store`` has them: ``id``, ``cell``, ``seconds``,
            ``ending``, ``ranks`` (those that failed) and so on.
        unreached: The node ids of the items that were collected and never ran.
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
        """Give each verdict and row the driver of its suite.

        An item that failed outside its check does not know the driver; other items of its suite do.
        """
        # The driver by the name and the node id of the suite.
        drivers: dict[tuple[str, str], str] = {}
        for row in self.rows:
            if row.driver:
                drivers[row.suite, row.place] = row.driver
        for row in self.rows:
            if not row.driver:
                row.driver = drivers.get((row.suite, row.place), "")
        results = []
        for result in self.results:
            driver = result.driver or drivers.get((result.suite, result.place), "")
            results.append(dataclasses.replace(result, driver=driver))
        self.results = results

    def pieces(self) -> Iterator[str]:
        """Yield the pieces of the JSON, a result, cell or run at a time.

        Each of them has a line of its own, so that the file can be searched and compared. The JSON
        of many verdicts need not be in memory as a whole.
        """
        session = {**self.session, "counts": counts(self)}
        yield f'{{\n "format": {FORMAT},\n "session": {_compact(session)}'
        lists: dict[str, Iterable[Any]] = {
            "results": map(_result_json, self.results),
            "cells": map(_row_json, self.rows),
            "runs": self.runs,
            "unreached": self.unreached,
        }
        for name, items in lists.items():
            yield f',\n "{name}": '
            yield from _list_pieces(items)
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
            raise UsageProblem(
                f"is no report: more than {MAX_DEPTH} objects and lists are inside one another"
            )
        # Only the first problem is shown.
        for problem in _problems(_schema(), data):
            raise UsageProblem(f"is no report: {problem}")
        return cls(
            session=data["session"],
            results=[decode(Verdict, result) for result in data["results"]],
            rows=[decode(Row, row) for row in data.get("cells", ())],
            runs=list(data.get("runs", ())),
            unreached=list(data.get("unreached", ())),
        )

    @classmethod
    def read(cls, path: Path) -> Report:
        """Return the report in a JSON file. Raises UsageProblem if there is none."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls.from_json(data)
        except OSError as error:
            raise UsageProblem(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise UsageProblem(f"{path}: {error}") from None
        except RecursionError:
            raise UsageProblem(
                f"{path}: is no report: too many objects and lists are inside one another"
            ) from None


def counts(report: Report) -> dict[str, int]:
    """Count the verdicts that were selected, that ran, that were not reached, and by status.

    Returns:
        For example ``{"selected": 96, "ran": 94, "unreached": 0, "red": 49, "passed": 30, ...}``,
        with a key for each status. ``ran`` is ``selected`` without what was skipped and what was
        not reached: it shows a suite that stops running.
    """
    results_by_status: Counter[Status] = Counter()
    red = 0
    for result in report.results:
        results_by_status[result.status] += 1
        if result.red:
            red += 1
    all_counts = {
        "selected": len(report.results) + len(report.unreached),
        "ran": len(report.results) - results_by_status[Status.SKIPPED],
        "unreached": len(report.unreached),
        "red": red,
    }
    for status in all_statuses():
        all_counts[status.name] = results_by_status[status]
    return all_counts


@functools.cache
def facets(cell: str) -> Mapping[str, Any]:
    """Return the facets of a cell id that are not at their default; nothing for any other text.

    Cached: each verdict has the id of its cell.
    """
    try:
        parsed = Cell.parse(cell)
    except ValueError:
        return {}
    return parsed.own_facets()


def _result_json(result: Verdict) -> dict[str, Any]:
    """Return a verdict as a report has it: with a shorter message and rounded times."""
    data = result.to_json()
    data["message"] = excerpt(result.message, MAX_MESSAGE)
    data["facets"] = facets(result.cell)
    data["seconds"] = round(result.seconds, 3)
    data["began"] = round(result.began, 3)
    return data


def _row_json(row: Row) -> dict[str, Any]:
    """Return what is known about a cell as a report has it."""
    return {**vars(row), "facets": facets(row.cell)}


def _too_deep(data: Any) -> bool:
    """Tell whether the JSON is nested deeper than any report.

    The functions below are recursive and would fail on it. So this one goes down level by level.
    """
    containers = [data]
    for _ in range(MAX_DEPTH):
        inner_containers = []
        for container in containers:
            values = container.values() if isinstance(container, Mapping) else container
            for value in values:
                if isinstance(value, (Mapping, list)):
                    inner_containers.append(value)
        if not inner_containers:
            return False
        containers = inner_containers
    return True


@functools.cache
def _schema() -> dict[str, Any]:
    """Return ``schema.json``, read once."""
    path = Path(__file__).with_name("schema.json")
    schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return schema


def _problems(schema: _Schema, data: Any, where: str = "") -> Iterator[str]:
    """Yield what in the JSON is not as the schema has it, so that it cannot be read.

    This is no complete validation: reports of other releases may lack keys and have new ones. Two
    keywords of the schema are this package's own: ``needed`` lists the keys without which an object
    cannot be read, and ``closed`` says that no other values than those of ``enum`` can be read.

    Args:
        schema: The part of the schema for this part of the JSON.
        data: This part of the JSON.
        where: Its place, as ``results[3].status``; empty for the whole.
    """
    if "$ref" in schema:
        # "#/$defs/status" stands for the definition of that name.
        _, _, definition = schema["$ref"].rpartition("/")
        # The schema lists the statuses of this package; an extension may add some.
        if definition == "status" and data in ADDED_STATUSES.names():
            return
        schema = _schema()["$defs"][definition]
    types = _schema_types(schema)
    if types and not _has_type(data, types):
        # That something may be null is not said: it is null where there is no value.
        labels = []
        for schema_type in types:
            if schema_type.label != "null":
                labels.append(schema_type.label)
        place = where or "it"
        yield f"{place} is {_short(data)}; expected {' or '.join(labels)}"
    elif "closed" in schema and data not in schema["enum"]:
        values = ", ".join(schema["enum"])
        yield f"{where} is {_short(data)}; expected one of {values}"
    elif isinstance(data, dict):
        yield from _object_problems(schema, data, where)
    elif isinstance(data, list):
        for number, value in enumerate(data):
            place = f"{where}[{number}]"
            yield from _problems(schema["items"], value, place)


def _object_problems(schema: _Schema, data: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield the problems of an object: needed keys that it lacks, then those of its values."""
    place = f" in {where}" if where else ""
    for name in schema.get("needed", ()):
        if name not in data:
            yield f"{name!r} is missing{place}"
    properties = schema.get("properties", {})
    for name, value in data.items():
        value_schema = properties.get(name, schema.get("additionalProperties"))
        if value_schema:
            value_place = f"{where}.{name}" if where else name
            yield from _problems(value_schema, value, value_place)


def _schema_types(schema: _Schema) -> list[_SchemaType]:
    """Return the types that a part of the schema allows; an empty list if it allows any.

    An ``enum`` without a ``type`` lists texts.
    """
    names = schema.get("type", [])
    if "type" not in schema and "enum" in schema:
        names = ["string"]
    elif isinstance(names, str):
        names = [names]
    return [_SCHEMA_TYPES[name] for name in names]


def _has_type(data: Any, types: Iterable[_SchemaType]) -> bool:
    """Tell whether a value of the JSON has one of the types."""
    # Not isinstance: in Python a bool is an int, in a report it is not.
    return any(type(data) in schema_type.python_types for schema_type in types)


def _short(data: Any) -> str:
    """Return a value of the JSON in a few words, for a message."""
    if isinstance(data, dict):
        return "an object"
    if isinstance(data, list):
        return "a list"
    if data is None:
        return "null"
    return ascii(data)[:60]


def _list_pieces(items: Iterable[Any]) -> Iterator[str]:
    """Yield the JSON of a list, with a line for each item; ``[]`` for an empty list."""
    before = "[\n  "
    end = "[]"
    for item in items:
        yield before + _compact(item)
        before = ",\n  "
        end = "\n ]"
    yield end


def _compact(value: Any) -> str:
    """Return the JSON of a value on one line."""
    return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    """Return the value with None for numbers that JSON does not have.

    Python would write ``NaN`` and ``Infinity``, which browsers refuse to read.
    """
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None
    if isinstance(value, Mapping):
        return {name: _finite(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(member) for member in value]
    return value
