"""``distcompat walk --calls``: which calls it makes, and what it says of those that a strategy lacks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pytest_distcompat.calls import Call
from pytest_distcompat.cli import main
from pytest_distcompat.ext.walk.explore import Explorer


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list in which calls are put instead of being run."""
    results: list[str] = []

    def check(_explorer: Explorer, calls: Sequence[Call]) -> tuple[Call, ...]:
        results.extend(map(str, calls))
        return ()

    monkeypatch.setattr(Explorer, "check", check)
    return results


def test_calls_that_the_strategy_lacks_are_passed_over_with_the_reason(
    made: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["walk", "--strategy", "ddp", "--calls", "step(), gather(), step(clip='no'), gather()"]) == 0
    assert made == ["step()", "step(clip='no')"]
    assert capsys.readouterr().out == "passed over: gather(): DDP shards nothing\n"


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("gather()", "--calls gather(): no call is left: gather(): DDP shards nothing"),
        ("", "--calls: no call is given"),
        ("stepp()", "--calls: stepp(): no such call. Known: "),
        ("load()", "--calls load(): a call may not follow those before it"),
    ],
)
def test_a_walk_that_cannot_be_made_is_refused(
    calls: str, message: str, made: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["walk", "--strategy", "ddp", "--calls", calls]) == 2
    assert message in capsys.readouterr().err
    assert made == []


def test_a_text_that_is_no_cell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["walk", "--cell", "fsdp2"]) == 2
    assert capsys.readouterr().err.startswith("distcompat: 'fsdp2' is no cell id; one reads like ")
