"""The built-in suite with a changed package, for the scripts that tell which changes it sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pytest_distcompat.ext.upstream.side_by_side import environment


def run_suite(changed: Path, report: Path, *arguments: str) -> int:
    """Run the built-in suite on the CPU; return pytest's exit status.

    Args:
        changed: A directory with the changed package, from which Python imports first.
        report: The file of the session's report. What pytest prints is in a ``.log`` beside it.
        arguments: Further arguments of pytest.
    """
    command = [sys.executable, "-m", "pytest", "--pyargs", "pytest_distcompat.suite", "-q"]
    command += ["-p", "no:cacheprovider", "--distcompat-gpus=0", f"--distcompat-report={report}"]
    with report.with_suffix(".log").open("wb") as log:
        process = subprocess.run(
            [*command, *arguments],
            env=environment(changed),
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return process.returncode
