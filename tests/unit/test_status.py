"""Statuses: those of extensions beside those of the core, and a report's that nobody here knows."""

from __future__ import annotations

import copy

import pytest

from pytest_distcompat.decode import decode
from pytest_distcompat.report.document import Report
from pytest_distcompat.status import ADDED_STATUSES, Status, Verdict, all_statuses, explained_statuses

RESULT = {"check": "names", "cell": "fsdp2-fp32-w64", "status": "simulated", "reason": "no values"}


def test_a_status_of_an_extension_is_among_all() -> None:
    names = [status.name for status in all_statuses()]
    assert names[:5] == ["passed", "refused", "known", "simulated", "skipped"]
    assert [status.heading for status in explained_statuses()] == ["known", "weaker than ok", "not run", "refused"]


def test_a_status_is_one_object() -> None:
    for status in all_statuses():
        assert Status.from_name(status.name) is status
        assert copy.deepcopy(status) is status


def test_a_report_is_read_without_the_extension_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(ADDED_STATUSES), "by_name", {})
    (result,) = Report.from_json({"format": 2, "session": {}, "results": [RESULT]}).results
    assert result.status == "simulated"
    assert result.status.word == "simulated"
    assert result.ok is False
    assert result.red is False
    assert not result.status.conclusive
    assert decode(Verdict, result.to_json()) == result


def test_a_report_with_a_status_of_an_extension_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = Status("replayed", "replayed", "known", Status.SKIPPED.weight, order=36)
    monkeypatch.setitem(vars(ADDED_STATUSES), "by_name", {"replayed": replayed})
    (result,) = Report.from_json({"format": 2, "session": {}, "results": [{**RESULT, "status": "replayed"}]}).results
    assert result.status is replayed
