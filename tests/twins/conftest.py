"""The wrong drivers are importable, here and in the ranks, as ``twins.twins_active`` and so on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import DRIVERS, preload_of
from pytest_distcompat.launch.hosting import LAUNCHERS
from pytest_distcompat.launch.request import Warmth
from pytest_distcompat.models import MODELS
from pytest_distcompat.runner import Runner

TESTS = str(Path(__file__).parents[1])

if TESTS not in sys.path:
    sys.path.append(TESTS)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """One launcher and one store for all twins, so that a sound run runs once."""
    cells = [Cell("ddp", "fp32", 2, (("model", model),)) for model in MODELS.names()]
    preload = {module for driver in DRIVERS.by_name.values() for module in preload_of(driver, cells)}
    with pytest.MonkeyPatch.context() as patch:
        # Before the fork server starts: a forked rank has the server's sys.path.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), TESTS))))
        patch.setenv("HF_HUB_OFFLINE", "1")
        launcher = LAUNCHERS["warm"](Warmth(("torch", *sorted(preload))))
        try:
            # As little as a busy machine does not take for slow.
            limits = {"throughput": 0.1}
            yield Runner(tmp_path_factory.mktemp("twins"), launcher, device="cpu", timeout=60, limits=limits)
        finally:
            launcher.close()
