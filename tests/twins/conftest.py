"""Make the twins importable, here and on ranks, as ``twins.twins_active`` and so on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import DRIVERS, preload_of
from pytest_distcompat.launch.request import Warmth
from pytest_distcompat.launch.torchrun import LAUNCHERS
from pytest_distcompat.models import MODELS
from pytest_distcompat.runner import Runner

TESTS = str(Path(__file__).parents[1])

if TESTS not in sys.path:
    sys.path.append(TESTS)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Return one launcher and one store for all twins, so that each sound run happens once."""
    cells = [Cell("ddp", "fp32", 2, (("model", model),)) for model in MODELS.names()]
    preload = {module for driver in DRIVERS.by_name.values() for module in preload_of(driver, cells)}
    with pytest.MonkeyPatch.context() as patch:
        # Before the fork server starts: a forked rank has the server's sys.path.
        inherited = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", f"{inherited}{os.pathsep}{TESTS}" if inherited else TESTS)
        patch.setenv("HF_HUB_OFFLINE", "1")
        launcher = LAUNCHERS["warm"](Warmth(("torch", *sorted(preload))))
        try:
            # So low that no run on a busy machine counts as slow.
            limits = {"throughput": 0.1}
            yield Runner(tmp_path_factory.mktemp("twins"), launcher, device="cpu", timeout=60, limits=limits)
        finally:
            launcher.close()
