"""Merging of reports: the parts of a matrix that several jobs ran."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from pytest_distcompat.report.document import ENDINGS, Report
from pytest_distcompat.report.result import Row
from pytest_distcompat.report.text import shortened
from pytest_distcompat.status import Verdict


def merge(reports: Sequence[Report]) -> Report:
    """Merge reports into one.

    Of several verdicts on a check in a cell the worst counts, and one that ran counts more than one that was skipped. An item
    that ran in any of the reports was reached. Names, dtypes, steps and cost of a cell are those of the first report that has
    them.
    """
    results: dict[tuple[str, ...], Verdict] = {}
    rows: dict[tuple[str, ...], Row] = {}
    runs: list[dict[str, Any]] = []
    for number, report in enumerate(reports, 1):
        for result in report.results:
            # Not by the driver: an item without a verdict may have none.
            key = (result.suite, result.place, result.cell, result.check)
            if key not in results or result.status.weight > results[key].status.weight:
                results[key] = result
        runs += [{**run, "id": f"{number}/{run['id']}"} for run in report.runs]
        for row in report.rows:
            numbered = dataclasses.replace(row, runs=[f"{number}/{run}" for run in row.runs])
            name = (row.suite, row.place, row.cell)
            rows[name] = _richer(rows[name], numbered) if name in rows else numbered
    reached = {result.nodeid for result in results.values()}
    unreached = dict.fromkeys(nodeid for report in reports for nodeid in report.unreached if nodeid not in reached)
    merged = Report(
        _session([report.session for report in reports]),
        list(results.values()),
        list(rows.values()),
        runs,
        list(unreached),
    )
    merged.fill_drivers()
    return merged


def _missing(sessions: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each shard that has tests and no report; shards that divided their tests alike belong together."""
    plans: dict[str, set[int]] = {}
    for shard in (session["shard"] for session in sessions if "shard" in session):
        plans.setdefault(json.dumps(shard["plan"]), set()).add(shard["number"])
    lines = [line for session in sessions for line in session.get("missing", ())]
    for plan, there in ((json.loads(text), numbers) for text, numbers in plans.items()):
        absent = [(number, units) for number, units in enumerate(plan, 1) if units and number not in there]
        lines += [f"shard {number}/{len(plan)} is missing: {shortened(units)}" for number, units in absent]
    if lines and len(plans) > 1:
        lines.append("the shards divided the tests in different ways; expected the same tests and baseline for all")
    return lines


def _richer(one: Row, other: Row) -> Row:
    """Return the row of both: all runs and reasons, of the rest what the first has, else what the other has."""
    known = {field.name: getattr(one, field.name) or getattr(other, field.name) for field in dataclasses.fields(Row)}
    return Row(
        **{**known, "runs": [*one.runs, *other.runs], "not_applicable": {**other.not_applicable, **one.not_applicable}}
    )


def _session(sessions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    settings = {name: setting for session in sessions for name, setting in session.get("settings", {}).items()}
    of_sessions = [session.get("settings", {}) for session in sessions]
    joined = {
        name: {"value": _join(str(one[name]["value"]) for one in of_sessions if name in one), "from": setting["from"]}
        for name, setting in settings.items()
    }
    names = dict.fromkeys(name for session in sessions for name in session.get("versions", {}))
    versions = {name: _join(session.get("versions", {}).get(name, "none") for session in sessions) for name in names}
    timeline, gaps = (
        [
            {**entry, "device": f"{number}/{entry['device']}"}
            for number, session in enumerate(sessions, 1)
            for entry in session.get(name, ())
        ]
        for name in ("timeline", "gaps")
    )
    for entry in timeline:
        # The id of a run differs between jobs; a node id is the same in all.
        if "::" not in entry["who"]:
            entry["who"] = f"{entry['device'].partition('/')[0]}/{entry['who']}"
    missing = _missing(sessions)
    endings = [session.get("ending", "finished") for session in sessions] + ["stopped"] * bool(missing)
    sizes = dict.fromkeys(session.get("world_size", "?") for session in sessions)
    return {
        "versions": versions,
        "device": _join(str(session.get("device", "?")) for session in sessions),
        "gpu": _join(session.get("gpu", "") for session in sessions),
        "world_size": next(iter(sizes)) if len(sizes) == 1 else _join(map(str, sizes)),
        "began": min((session["began"] for session in sessions if session.get("began")), default=""),
        "seconds": sum(session.get("seconds", 0.0) for session in sessions),
        "runs": sum(session.get("runs", 0) for session in sessions),
        # The worst counts.
        "ending": min(endings, key=ENDINGS.index, default="finished"),
        **({"missing": missing} if missing else {}),
        "settings": joined,
        "timeline": timeline,
        "gaps": gaps,
        "merged": [
            {name: value for name, value in session.items() if name not in {"timeline", "gaps"}} for session in sessions
        ],
    }


def _join(values: Any) -> str:
    """Join the different values, each once."""
    return " | ".join(dict.fromkeys(value for value in values if value))
