"""All that a run found, as one document: what every report is made from, and the JSON that it is kept in.

``schema.json`` beside this file describes the JSON; docs/reports.md explains it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from pytest_distcompat.cell import Cell
from pytest_distcompat.decode import MalformedError, check, decode
from pytest_distcompat.excerpt import excerpt
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report.format_1 import from_format_1
from pytest_distcompat.report.result import WORDS, Result, Row

#: Raised when a key changes its meaning or goes away; new keys may come at any time.
FORMAT = 2

#: How a session ended, from bad to good.
ENDINGS = ("internal error", "interrupted", "stopped", "finished")

#: How much of a verdict's message is kept, in characters: the whole story of a run that broke off stands once, with the run.
MESSAGE = 2500


#: How deep a document may be nested. Ours have six levels.
DEPTH = 50
#: What a cell's cost has, if it has one (``cost.Cost``).
COST = ("step_seconds", "tokens_per_second", "state_bytes", "memory")

_Setting = TypedDict("_Setting", {"value": str, "from": str})


class _NamedSpan(TypedDict):
    device: str
    who: str


class _Span(_NamedSpan, total=False):
    begin: float
    end: float
    worker: str
    leak: int


class _Baseline(TypedDict):
    file: str
    text: list[str]


class _Session(TypedDict, total=False):
    versions: dict[str, str]
    device: str
    gpu: str
    world_size: int | str
    began: str
    seconds: float
    runs: int
    ending: str
    settings: dict[str, _Setting]
    timeline: list[_Span]
    baseline: _Baseline
    merged: list[dict[str, Any]]


class _NamedRun(TypedDict):
    id: str


class _Run(_NamedRun, total=False):
    driver: str
    cell: str
    name: str
    world_size: int
    seconds: float
    ending: str
    action: str
    message: str
    ranks: list[dict[str, Any]]
    command: str


class _Needed(TypedDict):
    session: _Session
    results: list[Result]


class _Document(_Needed, total=False):
    """What reading relies on. Whoever only shows a value takes what there is."""

    cells: list[Row]
    runs: list[_Run]
    unreached: list[str]


@dataclass
class Report:
    """What one run found, or several merged.

    ``session``: versions, device, settings, how the session ended. ``runs``: the process groups (``evidence.store``).
    ``unreached``: the node ids of the items that were asked for and never ran.
    """

    session: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        """Whether the session was broken off."""
        return bool(self.session.get("ending", "finished") != "finished")

    def to_json(self) -> dict[str, Any]:
        """The document as plain data."""
        return {
            "format": FORMAT,
            "session": {**self.session, "counts": counts(self)},
            "results": [_result(result) for result in self.results],
            "cells": [{**dataclasses.asdict(row), "facets": facets(row.cell)} for row in self.rows],
            "runs": self.runs,
            "unreached": self.unreached,
        }

    def to_text(self) -> str:
        """The JSON: a line for each result, cell and run, so that it can be read, searched and compared."""
        return "".join(_lines(self.to_json()))

    @classmethod
    def from_json(cls, data: Any) -> Report:
        """The report that ``to_json`` wrote; keys that are not known are left out. Raises UsageProblem for anything else."""
        if not isinstance(data, Mapping) or "format" not in data:
            raise UsageProblem("is no report of pytest-distcompat")
        if data["format"] not in {1, FORMAT}:
            raise UsageProblem(f"format {data['format']!r} is not known here; expected 1 or {FORMAT}")
        if _too_deep(data):
            raise UsageProblem(f"is no report: more than {DEPTH} objects and lists are inside one another")
        if data["format"] == 1:
            data = from_format_1(data)
        try:
            check(_Document, data, "")
        except MalformedError as problem:
            raise UsageProblem(f"is no report: {problem}") from None
        results = [decode(Result, one) for one in data["results"]]
        rows = [Row(**_known(Row, one)) for one in data.get("cells", ())]
        # It would be neither red nor missing: a comparison would call it no news.
        unknown = [result.status for result in results if result.status not in WORDS]
        if unknown:
            raise UsageProblem(f"status {unknown[0]!r} is not known here. Known: {', '.join(WORDS)}")
        ending = data["session"].get("ending", ENDINGS[-1])
        if ending not in ENDINGS:
            raise UsageProblem(f"is no report: ending {ending!r}; expected one of {', '.join(ENDINGS)}")
        for place, row in enumerate(rows):
            lacking = [name for name in COST if row.cost and name not in row.cost]
            if lacking:
                raise UsageProblem(f"is no report: {lacking[0]!r} is missing in cells[{place}].cost")
        return cls(data["session"], results, rows, list(data.get("runs", ())), list(data.get("unreached", ())))

    @classmethod
    def read(cls, path: Path) -> Report:
        """The report in a JSON file. Raises UsageProblem if there is none."""
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise UsageProblem(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise UsageProblem(f"{path}: {error}") from None
        except RecursionError:
            raise UsageProblem(f"{path}: is no report: too many objects and lists are inside one another") from None
        except UsageProblem as problem:
            raise UsageProblem(f"{path}: {problem}") from None


def counts(report: Report) -> dict[str, int]:
    """How many verdicts were asked for, ran, were skipped or never reached; and how many there are of each status.

    A suite that goes dark shows in ``ran``: asked, less what was skipped and what was not reached.
    """
    found = Counter(result.status for result in report.results)
    asked = len(report.results) + len(report.unreached)
    told = {status: found[status] for status in WORDS}
    ran = len(report.results) - found["skipped"]
    red = sum(result.red for result in report.results)
    return {"asked": asked, "ran": ran, "unreached": len(report.unreached), "red": red, **told}


def facets(cell: str) -> dict[str, Any]:
    """Strategy, precision and world size of a cell, and the options that it names; nothing for what is no cell's id."""
    try:
        found = Cell.parse(cell)
    except ValueError:
        return {}
    fixed = {"strategy": found.strategy, "precision": found.precision, "world_size": found.world_size}
    return fixed | dict(found.options)


def _result(result: Result) -> dict[str, Any]:
    data = dataclasses.asdict(result)
    return {
        **data,
        "message": excerpt(result.message, MESSAGE),
        "seconds": round(result.seconds, 3),
        "facets": facets(result.cell),
    }


def _too_deep(data: Any) -> bool:
    """Tell whether the JSON is nested deeper than any report, and than functions that call themselves may go."""
    level = [data]
    for _ in range(DEPTH):
        level = [one for part in level for one in (part.values() if isinstance(part, Mapping) else part) if _nests(one)]
        if not level:
            return False
    return True


def _nests(value: Any) -> bool:
    return isinstance(value, (Mapping, list))


def _known(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in data.items() if name in names}


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    yield "{"
    separator = "\n"
    for name, value in data.items():
        if isinstance(value, list):
            parts = ",\n  ".join(_compact(one) for one in value)
            text = f"[\n  {parts}\n ]" if value else "[]"
        else:
            text = _compact(value)
        yield f"{separator} {json.dumps(name)}: {text}"
        separator = ",\n"
    yield "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    """The same without the numbers that JSON does not have, which browsers refuse to read: None in their place."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
