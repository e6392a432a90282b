"""A build of an extension that is killed leaves its lock: ours goes with the ranks, that of others is named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.ext.scripts import launch
from pytest_distcompat.failures import RunFailedError

if TYPE_CHECKING:
    from tests.faults.conftest import RunFaults

pytestmark = pytest.mark.spawn

#: As torch's load() does it, without the hours that a compiler may take: rank 0 builds, the others wait.
BUILD = """
import os
import time
from torch.utils.file_baton import FileBaton

def build():
    directory = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "ours")
    os.makedirs(directory, exist_ok=True)
    baton = FileBaton(os.path.join(directory, "lock"))
    if baton.try_acquire():
        print("builds", flush=True)
        time.sleep(600)
    baton.wait()
"""

BUILDS = f"""
{BUILD}
import pytest

@pytest.mark.distcompat(world_size=2, timeout=5)
def test_build(): build()
"""


@pytest.mark.nightly
def test_a_build_that_is_killed_leaves_no_lock(run_faults: RunFaults, tmp_path: Path) -> None:
    run = run_faults(BUILDS, TORCH_EXTENSIONS_DIR=str(tmp_path))
    run.shows("test_build", "time limit of 5 s: rank * is in build at test_faulty.py:*: time.sleep(600); *")
    assert not list(tmp_path.glob("*/lock"))
    assert "no process holds" not in run.lines("test_build")[0], "nobody left anything before"


@pytest.mark.nightly
def test_the_lock_of_a_killed_build_is_named(run_faults: RunFaults, tmp_path: Path) -> None:
    lock = tmp_path / "ours" / "lock"
    lock.parent.mkdir()
    lock.touch()
    run = run_faults(BUILDS, TORCH_EXTENSIONS_DIR=str(tmp_path))
    first = f"*: no process holds {lock}, which a build that was killed left: remove it"
    run.shows("test_build", f"time limit of 5 s: ranks 0, 1 are in build at test_faulty.py:*: baton.wait(){first}")
    assert lock.exists(), "it is not ours"


@pytest.mark.nightly
def test_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{BUILD}\nbuild()\n", encoding="utf-8")
    with pytest.raises(RunFailedError, match=r"rank \d is in build at .*train.py:\d+: time.sleep\(600\)"):
        launch(script, timeout=15, world_size=2, environment={"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert not list(tmp_path.glob("*/lock"))
