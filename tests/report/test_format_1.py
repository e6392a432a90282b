"""Reports of format 1 can be read, compared and merged with those of today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.cli import main
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.report import Report, merge


def verdict(option: str, status: str) -> dict[str, Any]:
    cell = f"fsdp2-fp32-w2{option}"
    nodeid = f"my-groups-w/test_it.py::TestIt::test[{cell}:names]"
    texts = {"message": "rank 1: is wrong", "nodeid": nodeid, "reproduce": f"pytest '{nodeid}'"}
    return {"suite": "TestIt", "driver": "d", "cell": cell, "check": "names", "status": status, **texts}


def old(**statuses: str) -> dict[str, Any]:
    """A document of format 1 with one verdict for each option."""
    cell = {"suite": "TestIt", "driver": "d", "cell": "fsdp2-fp32-w2-adapter-groups", "cost": {}, "lives": ["one"]}
    name = {"plain": "a.weight", "live": "module.a.weight", "shape": [2]}
    return {
        "format": 1,
        "run": {"lives": 3, "device": "cpu", "ending": "finished", "merged": [{"lives": 1}, {"lives": 2}]},
        "results": [verdict(f"-{option}", status) for option, status in statuses.items()],
        "cells": [{**cell, "blanks": {"units": "no units"}, "names": [name], "facets": {"adapter": True}}],
        "lives": [{"id": "one", "cell": "fsdp2-fp32-w2-model_plain-offload", "verb": "step", "ending": "raised"}],
        "unreached": ["t.py::TestIt::test[ddp-fp32-w4-replicate_2:names]"],
    }


def test_its_keys_and_cells_are_those_of_today() -> None:
    report = Report.from_json(old(accumulate_2="passed", wrap_size="failed", compile="passed"))
    assert (report.session["runs"], report.session["merged"]) == (3, [{"runs": 1}, {"runs": 2}])
    cells = ["fsdp2-fp32-w2-grad_accum_2", "fsdp2-fp32-w2-wrap_policy_size", "fsdp2-fp32-w2-compile"]
    assert [result.cell for result in report.results] == cells
    assert report.results[0].nodeid == "my-groups-w/test_it.py::TestIt::test[fsdp2-fp32-w2-grad_accum_2:names]"
    assert report.results[0].reproduce == f"pytest '{report.results[0].nodeid}'"
    (row,) = report.rows
    assert (row.cell, row.runs, row.not_applicable) == (
        "fsdp2-fp32-w2-lora-param_groups",
        ["one"],
        {"units": "no units"},
    )
    assert row.names == [{"unwrapped": "a.weight", "live": "module.a.weight", "shape": [2]}]
    assert report.runs == [
        {"id": "one", "cell": "fsdp2-fp32-w2-model_mlp-cpu_offload", "action": "step", "ending": "raised"}
    ]
    assert report.unreached == ["t.py::TestIt::test[ddp-fp32-w4-dp_replicate_2:names]"]
    assert report.to_json()["format"] == 2
    assert Report.from_json(report.to_json()).to_json() == report.to_json()


def test_it_is_compared_with_a_report_of_today(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "old.json", tmp_path / "new.json"
    before.write_text(json.dumps(old(adapter="passed", offload="failed", compile="passed")), encoding="utf-8")
    results = [verdict("-lora", "failed"), verdict("-cpu_offload", "passed"), verdict("-compile", "passed")]
    after.write_text(json.dumps({"format": 2, "session": {}, "results": results}), encoding="utf-8")
    assert main(["diff", str(before), str(after)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 newly broken, 0 newly missing, 1 newly fixed, 0 still broken, 0 new"
    assert "newly broken: fsdp2-fp32-w2-lora:names (d): ok -> FAIL: rank 1: is wrong" in lines


def test_it_is_merged_with_another() -> None:
    report = Report.from_json(old(compile="passed"))
    assert merge([report, report]).session["runs"] == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": 3}, "session is 3; expected an object"),
        ({"lives": {}}, "runs is an object; expected a list"),
        ({"lives": [None]}, r"runs\[0\] is null; expected an object"),
        ({"cells": [3]}, r"cells\[0\] is 3; expected an object"),
        ({"results": [{"cell": 3}]}, "is missing in results"),
        ({"unreached": [3]}, r"unreached\[0\] is 3; expected a text"),
    ],
)
def test_the_wrong_key_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageProblem, match=message):
        Report.from_json({**old(), **changes})


def test_a_part_that_must_be_there_is_missing() -> None:
    document = old()
    del document["run"]
    with pytest.raises(UsageProblem, match="'session' is missing"):
        Report.from_json(document)
