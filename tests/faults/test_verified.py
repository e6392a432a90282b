"""All faults once more under torchrun: no verdict on them may be another on warm ranks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.faults.conftest import RunFaults

pytestmark = [pytest.mark.spawn, pytest.mark.nightly]

#: By file of faults, the time limit of each test. One of the last builds an operator of DeepSpeed's.
FILES = {"die": 30, "hang": 60, "midway": 60, "output": 60, "raise": 60, "skip": 60, "state": 240}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.timeout(2400)
def test_cold_torchrun_gives_the_same_verdicts_of_faults(run_faults: RunFaults, name: str) -> None:
    args = ("--distcompat-verify=100", f"--distcompat-timeout={FILES[name]}")
    run = run_faults(f"faults_{name}.py", *args, seconds=1800.0, FAULTS_WORLD_SIZE="2")
    assert run.outcomes
    differing = re.findall(r"^warm ranks and torchrun's disagree.*", run.out, re.MULTILINE)
    assert not differing, run.out
