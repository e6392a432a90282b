"""One test for each private name that a hang's report uses: when it fails, the message says which function needs attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.faults.conftest import RunFaults

pytestmark = pytest.mark.spawn

RECORDED = """
import json
import time
import pytest
import torch
from torch import distributed
from pytest_distcompat.launch.forensics.flight_recorder import dumps

@pytest.mark.distcompat(world_size=2)
def test_recorded(process_group, record_property):
    work = distributed.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    # A torch with NCCL has a second recorder, in which gloo's collectives are not.
    # The waiting rank is reported before a thread of gloo's notes it.
    for _ in range(100):
        found = [entry for dump in dumps() for entry in json.loads(dump()).get("entries", ())][-1]
        if found["retired"]:
            break
        time.sleep(0.05)
    record_property("found", json.dumps(found))
"""


def test_the_flight_recorder(run_faults: RunFaults) -> None:
    run = run_faults(RECORDED)
    assert run.outcomes == {"test_recorded": "passed"}, (
        "torch._C._distributed_c10d._dump_fr_trace_json is gone or empty, so a hang's report has no groups and numbers: see "
        f"launch/forensics/flight_recorder.py:dumps\n{run.out}"
    )
    for part in (
        '"profiling_name": "gloo:all_reduce"',
        '"process_group": ["0", "default_pg"]',
        '"collective_seq_id": 2',
        '"input_sizes": [[3]]',
        '"input_dtypes": ["Float"]',
        '"retired": true',
        '"is_p2p": false',
        '"time_created_ns": ',
        '"state": ',
        '"p2p_seq_id": ',
    ):
        assert part in run.properties("test_recorded")["found"], (
            "an entry of torch's flight recorder is not what it was: see launch/forensics/collectives.py:_collective"
        )
