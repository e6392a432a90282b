"""The scripts of docs/upstream show each bug without the plugin. One that prints GONE is mended upstream: close its issue here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "docs" / "upstream").glob("*.py"))
#: Script -> the package that it needs and that need not be installed.
NEEDS = {"torchdata_sampler_epoch_end": "torchdata", "accelerate_stateful_dispatch": "torchdata"}
#: The others are nightly.
DAILY = {"deepspeed_zero1_frozen", "torch_fsdp2_two_dtypes"}

pytestmark = pytest.mark.spawn


@pytest.mark.nightly
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, id=script.stem, marks=[] if script.stem in DAILY else pytest.mark.nightly)
        for script in SCRIPTS
    ],
)
def test_the_script_shows_the_bug(script: Path, tmp_path: Path) -> None:
    needed = NEEDS.get(script.stem)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert any(line.startswith("SEEN") for line in done.stdout.splitlines()), done.stdout + done.stderr
