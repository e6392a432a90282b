"""Merging of reports: the parts of a matrix that several jobs ran, as one report.

``distcompat merge a.json b.json -o all.html`` calls ``merge`` with the reports of several jobs, for
example of one job for each version of Python, or of the *shards* of one matrix: with
``--distcompat-shard 2/3`` a job runs part 2 of 3 of the tests. ``report.trend`` calls it too, to
reduce one report. A report has *verdicts* (passed, failed, ...), each of one *check* in one *cell*
of a suite (a cell is a configuration, as ``fsdp2-fp32-w2``), and *runs*, each a process group with
its id. What is known about a cell besides its verdicts is its *row*. Jobs number runs and devices
independently. So these get the number of their report in front: the run ``x`` of the second report
becomes ``2/x``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from pytest_distcompat.report.document import ENDINGS, Report
from pytest_distcompat.report.result import Row, keep_worst
from pytest_distcompat.report.text import shortened
from pytest_distcompat.status import Verdict

#: What a session knows about itself, as ``Report.session``: ``{"device": "cpu", "world_size": 2,
#: "versions": {"torch": "2.13.0", ...}, "shard": {"number": 2, "plan": [...]}, ...}``.
_Session = dict[str, Any]


def merge(reports: Sequence[Report]) -> Report:
    """Merge reports into one.

    Of several verdicts on a check in a cell the worst counts. One that ran counts as worse than one
    that was skipped. An item that ran in any of the reports was reached. What is known about a cell
    besides, as its cost, is that of the first report that has it.
    """
    sessions = [report.session for report in reports]
    results = _worst_results(reports)
    merged = Report(
        session=_session(sessions),
        results=results,
        rows=_rows(reports),
        runs=_runs(reports),
        unreached=_unreached(reports, results),
    )
    # An item that failed outside its check does not know the driver (the trainer under test) of its
    # suite. Other items of the suite do.
    merged.fill_drivers()
    return merged


def _worst_results(reports: Iterable[Report]) -> list[Verdict]:
    """Return the worst verdict on each check in each cell of each suite."""
    worst: dict[tuple[str, ...], Verdict] = {}
    for report in reports:
        for result in report.results:
            # Not by the driver: an item without a verdict may have none.
            key = (result.suite, result.place, result.cell, result.check)
            keep_worst(worst, key, result)
    return list(worst.values())


def _rows(reports: Iterable[Report]) -> list[Row]:
    """Return one row for each cell of each suite, with what the reports know about it."""
    rows: dict[tuple[str, ...], Row] = {}
    for number, report in enumerate(reports, 1):
        for row in report.rows:
            run_ids = [f"{number}/{run}" for run in row.runs]
            numbered = dataclasses.replace(row, runs=run_ids)
            key = (row.suite, row.place, row.cell)
            if key in rows:
                rows[key] = _merged_row(rows[key], numbered)
            else:
                rows[key] = numbered
    return list(rows.values())


def _merged_row(first: Row, second: Row) -> Row:
    """Return the row of both: all runs, all reasons why checks do not apply to the cell.

    Any other field is that of the first row, or of the second if the first lacks it.
    """
    values = {}
    # A field without data is empty or None.
    for field in dataclasses.fields(Row):
        name = field.name
        values[name] = getattr(first, name) or getattr(second, name)
    values["runs"] = [*first.runs, *second.runs]
    values["not_applicable"] = {**second.not_applicable, **first.not_applicable}
    return Row(**values)


def _runs(reports: Iterable[Report]) -> list[dict[str, Any]]:
    """Return all runs, each with the number of its report at the beginning of its id."""
    runs = []
    for number, report in enumerate(reports, 1):
        for run in report.runs:
            run_id = f"{number}/{run['id']}"
            runs.append({**run, "id": run_id})
    return runs


def _unreached(reports: Iterable[Report], results: Iterable[Verdict]) -> list[str]:
    """Return the node ids of items that none of the reports has a result of."""
    reached = {result.nodeid for result in results}
    unreached: dict[str, None] = {}
    for report in reports:
        for nodeid in report.unreached:
            if nodeid not in reached:
                unreached[nodeid] = None
    return list(unreached)


def _session(sessions: Sequence[_Session]) -> _Session:
    """Return the session of a merged report.

    Values that differ are joined, as ``"device": "cpu | cuda"``. The key ``merged`` has the
    sessions themselves.
    """
    missing = _missing_shards(sessions)
    devices = _values(sessions, "device", "?")
    merged: _Session = {
        "versions": _versions(sessions),
        "device": _joined(map(str, devices)),
        "gpu": _joined(_values(sessions, "gpu", "")),
        "world_size": _world_size(sessions),
        "began": _first_begin(sessions),
        "seconds": sum(_values(sessions, "seconds", 0.0)),
        "runs": sum(_values(sessions, "runs", 0)),
        "ending": _worst_ending(sessions, missing),
    }
    if missing:
        merged["missing"] = missing
    merged["settings"] = _settings(sessions)
    merged["timeline"] = _device_times(sessions, "timeline")
    merged["gaps"] = _device_times(sessions, "gaps")
    merged["merged"] = [_without_device_times(session) for session in sessions]
    return merged


def _values(mappings: Iterable[dict[str, Any]], key: str, default: Any) -> list[Any]:
    """Return the value of each mapping under a key; ``default`` for a mapping without the key."""
    return [mapping.get(key, default) for mapping in mappings]


def _versions(sessions: Iterable[_Session]) -> dict[str, str]:
    """Return the versions of each package that any session names.

    ``none`` stands for the version in a session that does not name the package.
    """
    all_versions = _values(sessions, "versions", {})
    joined = {}
    for package in _keys(all_versions):
        joined[package] = _joined(_values(all_versions, package, "none"))
    return joined


def _settings(sessions: Iterable[_Session]) -> dict[str, dict[str, Any]]:
    """Return each setting with its values in all sessions, and its origin in the last of them.

    For example ``{"timeout": {"value": "20 | 60", "from": "option"}}``.
    """
    all_settings = _values(sessions, "settings", {})
    joined = {}
    for name in _keys(all_settings):
        values = []
        for settings in all_settings:
            if name in settings:
                setting = settings[name]
                values.append(str(setting["value"]))
                origin = setting["from"]
        joined[name] = {"value": _joined(values), "from": origin}
    return joined


def _keys(mappings: Iterable[dict[str, Any]]) -> list[str]:
    """Return the keys of all mappings, each once, in the order of their first appearance."""
    keys: dict[str, None] = {}
    for mapping in mappings:
        keys.update(dict.fromkeys(mapping))
    return list(keys)


def _world_size(sessions: Iterable[_Session]) -> Any:
    """Return the sessions' number of ranks, as 2; where they differ a text, as ``2 | 4``."""
    all_sizes = _values(sessions, "world_size", "?")
    sizes = list(dict.fromkeys(all_sizes))
    if len(sizes) == 1:
        return sizes[0]
    return _joined(map(str, sizes))


def _first_begin(sessions: Iterable[_Session]) -> str:
    """Return when the first session began; ISO 8601 in UTC sorts as text. Empty if none says it."""
    begins = []
    for session in sessions:
        if session.get("began"):
            begins.append(session["began"])
    return min(begins, default="")


def _worst_ending(sessions: Iterable[_Session], missing: Sequence[str]) -> str:
    """Return the worst of the sessions' endings; a missing shard is as bad as a stopped session."""
    endings = _values(sessions, "ending", "finished")
    if missing:
        endings.append("stopped")
    worst: str = min(endings, key=ENDINGS.index, default="finished")
    return worst


def _missing_shards(sessions: Sequence[_Session]) -> list[str]:
    """Return a line for each shard that has tests and no report.

    The session of a shard has its ``number``, from 1, and the ``plan``: a list of the cells and
    modules of each shard. Shards with the same plan belong together.
    """
    lines: list[str] = []
    # A plan, as JSON, to the numbers of the shards that have a report.
    shards_by_plan: dict[str, set[int]] = {}
    for session in sessions:
        # A report that was merged before has lines of its own.
        lines += session.get("missing", ())
        shard = session.get("shard")
        if shard is not None:
            plan_json = json.dumps(shard["plan"])
            shards_by_plan.setdefault(plan_json, set()).add(shard["number"])
    for plan_json, reported_shards in shards_by_plan.items():
        plan = json.loads(plan_json)
        for number, units in enumerate(plan, 1):
            if units and number not in reported_shards:
                shard_name = f"shard {number}/{len(plan)}"
                lines.append(f"{shard_name} is missing: {shortened(units)}")
    if lines and len(shards_by_plan) > 1:
        lines.append(
            "the shards divided the tests in different ways; "
            "expected the same tests and baseline for all"
        )
    return lines


def _device_times(sessions: Iterable[_Session], name: str) -> list[dict[str, Any]]:
    """Return the entries of all timelines or all gaps, with the session's number at each device.

    A timeline says which run or test had a device when, gaps say when a device was free. The device
    ``cpu-0.0`` of the second session becomes ``2/cpu-0.0``.

    Args:
        sessions: The sessions.
        name: ``timeline`` or ``gaps``.
    """
    entries = []
    for number, session in enumerate(sessions, 1):
        for session_entry in session.get(name, ()):
            entry = dict(session_entry)
            entry["device"] = f"{number}/{entry['device']}"
            # The id of a run differs between jobs; a node id is the same in all.
            if name == "timeline" and "::" not in entry["who"]:
                entry["who"] = f"{number}/{entry['who']}"
            entries.append(entry)
    return entries


def _without_device_times(session: _Session) -> _Session:
    """Return a session without its long lists, which the merged session has."""
    copy = dict(session)
    copy.pop("timeline", None)
    copy.pop("gaps", None)
    return copy


def _joined(values: Iterable[str]) -> str:
    """Return the values that are not empty as one text, each once: ``cpu | cuda``."""
    # A dict, because it keeps the order and has each only once.
    different: dict[str, None] = {}
    for value in values:
        if value:
            different[value] = None
    return " | ".join(different)
