"""What a session over two nodes says of each fault of the second one, by executor: a table of the docs, and the tests' expectations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

#: The seconds that benchmarks/node_faults.py measured, by fault and executor.
MEASURED = Path(__file__).with_name("node_faults.json")
EXECUTORS = ("local", "join", "slurm", "ray")

LOST = "was lost with its node: "
TERMINATED = f"rank 1 on n2 {LOST}its agent got SIGTERM"
GONE = f"rank 1 on n2 {LOST}its agent is gone"
SILENT = "sent nothing for some seconds: the link is cut, or the node is down"
CUT = f"rank 1 on n2 {LOST}{SILENT}"
ONE_MACHINE = {"local": "both nodes are this machine"}
STARTS_ALL = "it starts one agent a node"
FULL = "[Errno 28] No space left on device"


#: A test waits at a point until the test outside has done there what it does.
_FIRST = """
import time
from pathlib import Path

import pytest
from torch import distributed

HERE = Path(__file__).parent

def point(name):
    (HERE / name).touch()
    while not (HERE / f"{name}-done").exists():
        time.sleep(0.05)

@pytest.mark.distcompat(world_size=2, nodes=2)
def test_before(process_group):
    pass
"""
_LAST = """
@pytest.mark.distcompat(world_size=2, nodes=2, timeout=200)
def test_after(process_group):
    pass

@pytest.mark.distcompat(world_size=2, nodes=1)
def test_one_node():
    pass
"""
#: In pytest's own process, right before the run.
_CONFTEST = """
import test_faults

def pytest_runtest_logstart(nodeid):
    if nodeid.endswith("test_{point}"):
        test_faults.point("{point}")
"""


def write_tests(directory: Path, tests: str, point: str) -> None:
    """Write tests that meet faults, between one before and those after; right before one of them pytest waits at its point."""
    (directory / "test_faults.py").write_text(_FIRST + tests + _LAST)
    (directory / "conftest.py").write_text(_CONFTEST.format(point=point))


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and what is expected of it.

    Attributes:
        words: The fault, as the table has it.
        says: What stands in the first line of the verdict, or of the session's error; empty where tests pass.
        within: The seconds from the fault to the verdict, at most.
        instead: What it says with other executors, by name.
        impossible: Why there is no such fault, by the name of the executor.
    """

    words: str
    says: str = ""
    within: int = 0
    instead: Mapping[str, str] = dataclasses.field(default_factory=dict)
    impossible: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def text(self, executor: str) -> str:
        """Return what stands in the first line with that executor."""
        return self.instead.get(executor, self.says)


#: By the name of the test that meets the fault.
FAULTS: Mapping[str, Fault] = {
    "killed": Fault("its agent is killed", GONE, 15),
    "preempted": Fault("its agent gets SIGTERM, as at preemption", TERMINATED, 15),
    "taken": Fault(
        "its scheduler ends the agent: `scancel` of the step, end of the Ray node",
        GONE,
        15,
        # The step has the agents of both nodes, and SIGKILL follows SIGTERM at once.
        instead={"slurm": f"{LOST}its agent"},
        impossible=dict.fromkeys(("local", "join"), "no scheduler"),
    ),
    "cut": Fault("the link is cut in a collective", CUT, 25, impossible=ONE_MACHINE),
    "cut_meeting": Fault(
        "the link is cut before ranks start",
        f"the ranks could not be started: n2: {SILENT}",
        25,
        impossible=ONE_MACHINE,
    ),
    # Within the silence after which a node is lost, and 10 s.
    "cut_rendezvous": Fault("the link is cut in the rendezvous of the agents", CUT, 16, impossible=ONE_MACHINE),
    "slow": Fault("the link has 8 Mbit/s and drops packets", impossible=ONE_MACHINE),
    "full": Fault("its disk is full", f"the ranks could not be started: n2: {FULL}", 15, impossible=ONE_MACHINE),
    "filled": Fault(
        "its disk fills in a test that prints", f"rank 1 on n2 failed: OSError: {FULL}", 15, impossible=ONE_MACHINE
    ),
    "clock": Fault(
        "its clock is an hour ahead",
        "the clock of n2 is +3600 s off that of n1; expected 5 s at most",
        impossible=ONE_MACHINE,
    ),
    "absent": Fault(
        "it never comes",
        "1 of 2 nodes are there (n1)",
        instead={"slurm": "there are 1 of 2 nodes: n1", "ray": "the cluster has 1 of 2 nodes"},
        impossible={"local": STARTS_ALL},
    ),
    "twice": Fault(
        "it comes twice",
        "a node of that name has joined from 10.97.0.2 already; expected another --name",
        impossible=dict.fromkeys(("local", "slurm", "ray"), STARTS_ALL),
    ),
}
