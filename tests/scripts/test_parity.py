"""One script on one rank and on two, with the same global batch."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_distcompat.ext.scripts import Parity, parity
from pytest_distcompat.ext.scripts.launching import Host
from pytest_distcompat.failures import Incompatible, UsageProblem

from .conftest import PROGRAMS

LOOP = PROGRAMS / "parity_loop.py"


def compared(host: Host, *more: str, strategy: str = "ddp") -> Parity:
    """Four steps on eight rows."""
    arguments = ["--strategy", strategy, *more]
    return parity(
        LOOP, one=["--batch", "8", *arguments], many=["--batch", "4", *arguments], steps=4, strategy=strategy, host=host
    )


@pytest.mark.spawn
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_the_same_training_on_two_ranks(module_host: Host, strategy: str) -> None:
    findings = compared(module_host, strategy=strategy)
    assert findings.findings == []
    assert [run.trace.world_size for run in (findings.one, findings.many)] == [1, 2]


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("data", r"^step 1: the loss is [\d.]+ on several ranks; [\d.]+ on one \(4e-05 allowed\)"),
        pytest.param("sum", r"^step 1: the loss is [\d.]+ on several ranks", marks=pytest.mark.nightly),
        pytest.param(
            "drift",
            r"^after the last step '0\.bias' and 3 others have other values than on one rank",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_another_training_on_two_ranks(module_host: Host, fault: str, message: str) -> None:
    with pytest.raises(Incompatible, match=message):
        compared(module_host, "--fault", fault)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps=0: expected a number of steps, 1 or more"),
        ({"one": "--batch 8"}, "one='--batch 8': expected a list of texts"),
        ({"world_size": 1}, "world_size=1: expected a number of ranks, 2 or more"),
        ({"stop_after": 2}, "parity takes no stop_after: it says that of each run itself"),
    ],
)
def test_wrong_arguments(host: Host, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageProblem, match=message):
        parity(LOOP, **{"one": [], "many": [], "steps": 4, "host": host, **arguments})
