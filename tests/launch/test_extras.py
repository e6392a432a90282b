"""Each extra alone has what its suite needs: installed in an environment of its own, the suite's smoke profile passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Extras to install, and the options of the suite's run.
EXTRAS = {
    "torch": ["--distcompat-drivers=torch"],
    "accelerate": ["--distcompat-drivers=accelerate"],
    "transformers": ["--distcompat-drivers=trainer"],
    "deepspeed": ["--distcompat-drivers=deepspeed"],
    "fp8": ["--distcompat-drivers=torch"],
    "lora": ["--distcompat-drivers=torch"],
    # These two add to pytest and know no torch.
    "torch,xdist": ["--distcompat-drivers=torch", "-n2"],
    "torch,pairwise": ["--distcompat-drivers=torch"],
    "torch,otel": ["--distcompat-drivers=torch"],
    "torch,reach": ["--distcompat-drivers=torch", "--distcompat-reach=reach.sqlite"],
}

#: The interpreter of those environments.
PYTHON = os.environ.get("EXTRAS_PYTHON", sys.executable)

pytestmark = [pytest.mark.spawn, pytest.mark.nightly]


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH"))}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_alone_suffices(extra: str, tmp_path: Path) -> None:
    # uv links the files of its cache, so that environments of one interpreter share gigabytes of torch.
    run("uv", "venv", "--python", PYTHON, "environment", cwd=tmp_path)
    python = tmp_path / "environment" / "bin" / "python"
    install = ("uv", "pip", "install", "--quiet", "--python", python, "--constraint", ROOT / "constraints.txt")
    # Torch first, as the documentation says: alone, so that a CPU machine need not have the build for CUDA.
    for wanted in ("torch", f"{ROOT}[{extra}]"):
        installed = run(*install, wanted, cwd=tmp_path)
        assert installed.returncode == 0, installed.stderr
    suite = ("-m", "pytest", "--pyargs", "pytest_distcompat.suite", "-q", "-p", "no:cacheprovider")
    done = run(python, *suite, "--distcompat-gpus=0", "--distcompat-profile=smoke", *EXTRAS[extra], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert " failed" not in done.stdout


@pytest.mark.parametrize("version", re.findall(r":: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text("utf-8")))
def test_the_pinned_releases_install_on_each_python(version: str) -> None:
    options = ("--quiet", "--constraint", "constraints.txt", "--extra", "all", "--group", "dev", "pyproject.toml")
    resolved = run("uv", "pip", "compile", "--python-version", version, *options, cwd=ROOT)
    assert resolved.returncode == 0, resolved.stderr
    assert "\npytest==" in resolved.stdout
