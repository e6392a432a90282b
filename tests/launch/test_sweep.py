"""The profile ``sweep``, from the fields of what is installed to the verdicts of their cells."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_distcompat import check_driver
from pytest_distcompat.status import Status

pytestmark = pytest.mark.spawn


def test_a_setting_is_accepted_and_changes_nothing_or_is_refused() -> None:
    cells = [
        "fsdp2-fp32-w2-model_mlp-set_fully_shard.reshard_after_forward=2",
        "fsdp2-fp32-w2-model_mlp-set_fully_shard.reshard_after_forward=0",
    ]
    accepted, refused = check_driver("torch", cells, ["parity"], device="cpu")
    assert accepted.status is Status.PASSED
    assert refused.status is Status.REFUSED
    assert "should be a factor of 2, not 0" in refused.reason


#: Two settings that are wrong together, two that are refused together, and one that is neither.
PAIRED = """
import dataclasses

from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.settings import Source


@dataclasses.dataclass
class Config:
    overlap: bool = False
    compress: bool = False
    shard: bool = False
    half: bool = False
    log: bool = False


class Paired(TorchDriver):
    name = "paired"
    sources = (Source("Config", "paired.Config", ("ddp",)),)

    def build(self, model):
        self.config = Config(**self.cell.settings("Config"))
        if self.config.shard and self.config.half:
            raise ValueError("shard needs whole precision")
        super().build(model)

    def update(self):
        if self.config.overlap and self.config.compress:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(2)
        super().update()
"""


@pytest.mark.nightly
def test_pairs_that_fail_are_reduced_to_the_two_settings(tmp_path: Path) -> None:
    (tmp_path / "paired.py").write_text(PAIRED, encoding="utf-8")
    command = [sys.executable, "-m", "pytest_distcompat.cli", "settings", "--driver=paired:Paired", "--pairs=ddp"]
    command += ["-o", "pairs.json", "-o", "pairs.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stdout + done.stderr
    parts = {frozenset(line.split(" + ")): how.strip() for line, how, *_ in zip(lines[1::3], lines[2::3], strict=True)}
    wrong, refused = {"Config.overlap=true", "Config.compress=true"}, {"Config.shard=true", "Config.half=true"}
    assert parts.keys() == {frozenset(wrong), frozenset(refused)}
    assert "failed: step 1" in parts[frozenset(wrong)]
    assert "shard needs whole precision" in parts[frozenset(refused)]
    results = json.loads((tmp_path / "pairs.json").read_text(encoding="utf-8"))["results"]
    assert {(frozenset(result["facets"]["set"].split("+")), result["status"]) for result in results} == {
        (frozenset(wrong), "failed"),
        (frozenset(refused), "refused"),
    }
    assert all(result["reproduce"] in done.stdout for result in results)
    assert any("the smallest part that fails of a row of" in result["message"] for result in results)
    assert "Config.shard + Config.half" in (tmp_path / "pairs.html").read_text(encoding="utf-8")


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """A copy of accelerate whose FSDP plugin has two new fields: one changes nothing, one doubles the loss."""
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None
    assert spec.origin is not None
    copy = tmp_path / "stack" / "accelerate"
    shutil.copytree(Path(spec.origin).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, pattern, new in (
        (
            "utils/dataclasses.py",
            r"(class FullyShardedDataParallelPlugin:.*?)(    def __post_init__)",
            r"\1    new_and_sound: bool = False\n    new_and_wrong: bool = False\n\n\2",
        ),
        (
            "accelerator.py",
            r"(    def backward\(self, loss, \*\*kwargs\):\n.*?\"\"\".*?\"\"\"\n)",
            r"\1        loss = loss * (1 + getattr(self.state.fsdp_plugin, 'new_and_wrong', False))\n",
        ),
    ):
        text = (copy / name).read_text(encoding="utf-8")
        changed, count = re.subn(pattern, new, text, count=1, flags=re.DOTALL)
        assert count == 1, name
        (copy / name).write_text(changed, encoding="utf-8")
    return copy.parent


@pytest.mark.nightly
def test_a_field_of_a_new_release_is_swept_without_a_line_of_ours(stack: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "--pyargs", "pytest_distcompat.suite", "-q", "-p", "no:cacheprovider"]
    command += ["--distcompat-profile=sweep", "--distcompat-drivers=accelerate", "--distcompat-strategies=fsdp2"]
    command += ["--distcompat-report=report.json", "--distcompat-budget=1h", "-k", "new_and", f"--rootdir={tmp_path}"]
    path = os.pathsep.join(filter(None, [str(stack), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    results = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["results"]
    red = {result["check"] for result in results if "new_and_wrong" in result["cell"] and result["status"] == "failed"}
    sound = {result["status"] for result in results if "new_and_sound" in result["cell"]}
    assert done.returncode == 1, done.stdout + done.stderr
    assert {"parity", "clipping"} <= red
    assert sound == {"passed"}
    assert "budget 3600 s in order @" in done.stdout
