"""The JSON: what the schema says, and that it can be read again."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_distcompat import report as report_room
from pytest_distcompat.excerpt import excerpt
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report.compare import compare
from pytest_distcompat.report.document import Report, counts, facets
from pytest_distcompat.report.merge import merge
from pytest_distcompat.report.result import Row
from pytest_distcompat.report.write import FORMATS, write_report
from pytest_distcompat.status import Status, Verdict, all_statuses

from .conftest import REAL

SCHEMA = json.loads(Path(report_room.__file__).with_name("schema.json").read_text(encoding="utf-8"))


@functools.cache
def red_statuses() -> list[str]:
    return [status.name for status in all_statuses() if status.red]


def read_json(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return json.loads(text)


def problems(data: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(data)]


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_a_real_report_is_as_the_schema_says() -> None:
    data = read_json(REAL)
    assert problems(data) == []
    # And is worth looking at.
    statuses = {result["status"] for result in data["results"]}
    assert statuses >= {"passed", "refused", "known", "skipped"}
    assert statuses >= set(red_statuses()) - {"late", "leaked", "error"}
    endings = {run["ending"] for run in data["runs"]}
    assert endings >= {"ok", "raised", "crashed", "hung"}
    full_cells = [cell for cell in data["cells"] if cell["names"] and cell["dtypes"] and cell["steps"]]
    assert full_cells
    ranks = []
    for run in data["runs"]:
        ranks += run["ranks"]
    for part in ("text", "stack", "collectives", "output"):
        assert any(rank[part] for rank in ranks), part
    statuses_of_ranks = {rank["status"] for rank in ranks}
    assert statuses_of_ranks >= {"raised", "killed", "stuck"}


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda data: data.pop("runs"),
        lambda data: data.update(format=1),
        lambda data: data["results"][0].update(status="maybe"),
        lambda data: data["results"][0].pop("rank"),
        lambda data: data["session"].update(ending="bored"),
        lambda data: data["session"]["counts"].pop("unreached"),
        lambda data: data["cells"][0]["memory"].append(-1),
        lambda data: data["runs"][0].update(ending="good"),
    ],
)
def test_the_schema_refuses_what_is_wrong(corrupt: Any) -> None:
    data = read_json(REAL)
    corrupt(data)
    assert problems(data)


def test_the_schema_knows_every_status_and_every_key() -> None:
    others = ["passed", "refused", "known", "simulated", "skipped"]
    assert SCHEMA["$defs"]["status"]["enum"] == [*others, *red_statuses()]
    data = read_json(REAL)
    for kind, entries in (("result", data["results"]), ("cell", data["cells"]), ("run", data["runs"])):
        properties = SCHEMA["$defs"][kind]["properties"]
        keys = set().union(*entries)
        assert keys == set(properties)


def test_a_written_report_is_read_back(real: Report, tmp_path: Path) -> None:
    path = tmp_path / "again.json"
    write_report(path, real)
    # As data: a whole number in a field of real numbers is written as one.
    assert read_json(path) == read_json(REAL)
    assert Report.read(path).to_text() == real.to_text()


def test_one_result_is_one_line(real: Report) -> None:
    lines_of_results = [line for line in real.to_text().splitlines() if '"status"' in line]
    for result in real.results:
        nodeid = json.dumps(result.nodeid)
        lines = [line for line in lines_of_results if nodeid in line]
        assert len(lines) == 1


def test_a_report_of_an_earlier_release_is_read() -> None:
    """Its keys are those of the first release: later ones are missing, a later one's are not known."""
    old = {
        "format": 2,
        "session": {"versions": {}},
        "results": [
            {"suite": "S", "driver": "d", "cell": "ddp-fp32-w2", "check": "names", "status": "passed", "new": 1}
        ],
        "cells": [{"suite": "S", "driver": "d", "cell": "ddp-fp32-w2", "not_applicable": {}, "cost": {}}],
    }
    report = Report.from_json(old)
    assert report.results[0].status == "passed"
    assert report.rows[0].runs == []
    assert report.runs == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "Expecting value"),
        ("[]", "is no report of pytest-distcompat"),
        ("{}", "is no report of pytest-distcompat"),
        ('{"format": 7}', "format 7 is not known here; expected 2"),
        ('{"format": 2, "session": {}, "results": [{"suite": "S"}]}', "is no report"),
        ('{"format": 2, "session": [1], "results": []}', "is no report"),
        ('{"format": 2, "session": {}, "results": [], "runs": 3}', "is no report"),
        ('{"format": 2, "session": {}, "results": [], "runs": [{"name": "train"}]}', "is no report: 'id'"),
        ('{"format": 2, "session": {}, "results": [], "unreached": 3}', "is no report"),
        ('{"format": 2, "session": {"settings": {"profile": "smoke"}}, "results": []}', "is no report"),
        ('{"format": 2, "session": {"timeline": [{"device": "cpu"}]}, "results": []}', "is no report: 'who'"),
        (
            '{"format": 2, "session": {"ending": "fine"}, "results": []}',
            "is no report: session.ending is 'fine'; expected one of internal error, ",
        ),
        ('{"format": 2, "results": []}', "is no report: 'session' is missing"),
        ('{"format": 2, "session": {}, "results": [3]}', "is no report: results[0] is 3; expected an object"),
        ('{"format": 2, "session": {}, "results": [], "unreached": [[]]}', "unreached[0] is a list; expected a text"),
        ('{"format": 2, "session": {"seconds": true}, "results": []}', "session.seconds is True; expected a number"),
        (
            '{"format": 2, "session": {"world_size": []}, "results": []}',
            "session.world_size is a list; expected a whole number",
        ),
        (
            '{"format": 2, "session": {"baseline": {"file": "a"}}, "results": []}',
            "'text' is missing in session.baseline",
        ),
        (
            f'{{"format": 2, "session": {"[" * 500}{"]" * 500}, "results": []}}',
            "more than 50 objects and lists are inside",
        ),
        ("[" * 100000, "too many objects and lists"),
        # Neither red nor missing, it would be no news.
        (
            '{"format": 2, "session": {}, "results": [{"suite": "S", "driver": "", "cell": "", "check": "", "status": "bad"}]}',
            "results[0].status is 'bad'; expected one of passed, ",
        ),
    ],
)
def test_a_file_that_is_no_report_is_a_usage_error(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "no.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageProblem, match=r"no\.json: ") as caught:
        Report.read(path)
    assert error in str(caught.value)


#: What there is in JSON, each kind once.
VALUES: tuple[Any, ...] = (None, True, -1, 2.5, float("inf"), "", "\ud800\x1b[31m|`<b>", [], [None], {}, {"a": {}})


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values inside."""
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(data, dict):
        children = data.items()
    elif isinstance(data, list):
        children = enumerate(data)
    for name, value in children:
        path_of_child = (*path, name)
        yield path_of_child
        yield from places(value, path_of_child)


@functools.cache
def small() -> str:
    """Return the real report with a few of everything, so that each mutation hits something else."""
    data = read_json(REAL)
    data["session"]["timeline"] = data["session"]["timeline"][:2]
    data["session"]["baseline"] = {
        "file": "last.json",
        "text": ["0 newly broken"],
        "broken": [],
        "fixed": [],
        "missing": [],
    }
    by_status = {result["status"]: result for result in data["results"]}
    data["results"] = list(by_status.values())
    costly = [cell for cell in data["cells"] if cell["cost"]]
    data["cells"] = [data["cells"][0], *costly[:1]]
    data["runs"] = data["runs"][:2]
    return json.dumps(data)


PLACES = sorted(places(json.loads(small())), key=str)
CHANGE = st.tuples(st.sampled_from(PLACES), st.sampled_from((*VALUES, "remove")))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(CHANGE, min_size=1, max_size=3))
def test_a_report_that_somebody_changed_is_read_or_the_field_is_named(changes: list[tuple[Any, Any]]) -> None:
    data = json.loads(small())
    for path, value in changes:
        # An earlier change may have removed the place of a later one.
        with contextlib.suppress(LookupError, TypeError):
            change(data, path, value)
    complete = Report.from_json(json.loads(small()))
    try:
        changed = Report.from_json(json.loads(json.dumps(data)))
    except UsageProblem as problem:
        message = str(problem)
        assert len(message.splitlines()) == 1
        return
    for earlier, later in ((complete, changed), (changed, complete), (changed, changed)):
        list(compare(earlier, later).lines())
        merge([earlier, later]).to_text()
    for make in FORMATS.values():
        make(changed).encode("utf-8", "replace")


def change(data: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value in that place, or remove what is there."""
    *names, last = path
    parent = data
    for name in names:
        parent = parent[name]
    if value == "remove":
        del parent[last]
    else:
        parent[last] = value


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="No such file"):
        Report.read(tmp_path / "none.json")


def test_counts_of_a_suite_that_goes_dark() -> None:
    results = [
        Verdict("names", "ddp-fp32-w1", Status.PASSED),
        Verdict("names", "ddp-fp32-w2", Status.KNOWN),
        Verdict("names", "ddp-fp32-w3", Status.SKIPPED),
        Verdict("names", "ddp-fp32-w4", Status.SKIPPED),
        Verdict("names", "ddp-fp32-w5", Status.HUNG),
    ]
    counted = counts(Report(results=results, unreached=["a", "b"]))
    nonzero = {name: count for name, count in counted.items() if count}
    assert nonzero == {
        "selected": 7,
        "ran": 3,
        "unreached": 2,
        "red": 1,
        "passed": 1,
        "known": 1,
        "skipped": 2,
        "hung": 1,
    }


def test_facets_of_a_cell() -> None:
    assert facets("fsdp2-bf16_upcast-w4-compile") == {
        "strategy": "fsdp2",
        "precision": "bf16_upcast",
        "world_size": 4,
        "compile": True,
    }
    assert facets("param0") == {}


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    text = excerpt("a" * 5000 + "the end", 300)
    assert len(text) < 400
    assert text.startswith("aaa")
    assert text.endswith("the end")
    assert "4707 characters cut" in text
    assert excerpt("short", 300) == "short"


def test_numbers_that_json_does_not_have_are_none(tmp_path: Path) -> None:
    row = Row("S", "d", "ddp-fp32-w2", cost={"mfu": math.nan}, steps={"loss": [1.0, math.inf]})
    path = tmp_path / "n.json"
    write_report(path, Report(rows=[row]))
    data = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    (cell,) = data["cells"]
    assert cell["cost"] == {"mfu": None}
    assert cell["steps"] == {"loss": [1.0, None]}


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_full_run_in_which_everything_fails_is_not_too_large(suffix: str, real: Report, tmp_path: Path) -> None:
    """1400 verdicts of 110 cells, each with a long story, as they would come from a broken trainer."""
    story = "".join(f"line {number} of a traceback that has no end\n" for number in range(700))
    trained = next(row for row in real.rows if row.names)
    results = []
    rows = []
    for size in range(1, 111):
        cell = f"fsdp2-fp32-w{size}"
        rows.append(Row("S", "d", cell, names=trained.names * 5, dtypes=trained.dtypes, steps=trained.steps))
        for number in range(13):
            check = f"check{number}"
            nodeid = f"t::S::test[{cell}:{check}]"
            results.append(Verdict(check, cell, Status.FAILED, story, suite="S", driver="d", nodeid=nodeid))
    fields = {
        "status": "raised",
        "message": "raised",
        "text": excerpt(story, 3500),
        "stack": "",
        "collectives": "",
        "output": excerpt(story, 1000),
    }
    ranks = [{"rank": 0, **fields}, {"rank": 1, **fields}]
    runs = []
    for number in range(670):
        runs.append({**real.runs[0], "id": f"run-{number}", "ranks": ranks})
    report = Report(real.session, results, rows, runs)
    path = tmp_path / f"full{suffix}"
    write_report(path, report)
    assert path.stat().st_size < 12_500_000
