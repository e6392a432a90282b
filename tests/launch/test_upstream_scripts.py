"""The scripts of docs/upstream show each bug without the plugin. One that prints GONE is mended upstream: close its issue here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "docs" / "upstream").glob("*.py"))
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
