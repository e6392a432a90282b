"""The fork server hangs, while it imports what all ranks need: that ends at a limit of its own, and says where it hung."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.faults.conftest import RunFaults

pytestmark = pytest.mark.spawn

HANGS = """
import sys
import time
import pytest

def wait_for_ever():
    time.sleep(600)

if "pytest_distcompat.launch.preload" in sys.modules:
    wait_for_ever()

@pytest.mark.distcompat(world_size=2)
def test_never(process_group):
    pass

def test_ordinary():
    pass
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.nightly)], ids=["alone", "workers"]
)
def test_a_module_that_hangs_in_the_fork_server(run_faults: RunFaults, workers: tuple[str, ...]) -> None:
    # On a machine that is busy torch itself may not have been imported by then, and is what is said to hang.
    for limit in (12, 60):
        run = run_faults(HANGS, f"--distcompat-warm-timeout={limit}", *workers)
        if "in wait_for_ever" in run.out:
            break
    assert run.outcomes == {"test_never": "failed", "test_ordinary": "passed"}, run.out
    message = f"did not get ready within {limit} s: a module or a conftest.py hangs at import"
    run.shows("test_never", f"the ranks could not be started: *{message}*", "*test_faulty.py*, line * in wait_for_ever")
    assert not run.leftovers
