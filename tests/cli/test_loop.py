"""The driver that ``init`` writes for a loop in plain torch: it is to be filled in, and fails until it is."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.cli import main
from pytest_distcompat.driver import REQUIRED_METHODS
from pytest_distcompat.world import World

LOOP = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def main(accum=2):
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(x), y) / accum
        loss.backward()
        if (i + 1) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
CLASS = """
import torch
from torch.distributed.fsdp import fully_shard

class Trainer:
    def fit(self):
        fully_shard(self.model)
        while self.goes_on():
            self.loss().backward()
            self.optimizer.step()
"""
FSDP1 = CLASS.replace("fully_shard", "FullyShardedDataParallel")


@pytest.mark.parametrize(
    ("code", "strategy"),
    [
        pytest.param(LOOP, "ddp", id="accumulates"),
        pytest.param(CLASS, "fsdp2", id="a class"),
        pytest.param(FSDP1, "fsdp1", id="FSDP1"),
    ],
)
def test_a_loop_gets_a_driver_to_fill_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, strategy: str
) -> None:
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    assert main(["init", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "tests/distcompat_driver.py is for the loop of train: fill in its 5 TODOs, it fails until then" in printed
    suite = (tmp_path / "tests" / "test_distcompat.py").read_text(encoding="utf-8")
    assert 'driver = "distcompat_driver:LoopDriver"' in suite
    assert f'Matrix(strategies=("{strategy}",), precisions=("fp32",))' in suite
    assert "pythonpath = ." in (tmp_path / "pytest.ini").read_text(encoding="utf-8")


def test_each_method_raises_until_it_is_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(LOOP, encoding="utf-8")
    main(["init", str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path / "tests")
    monkeypatch.delitem(sys.modules, "distcompat_driver", raising=False)
    driver: Any = importlib.import_module("distcompat_driver").LoopDriver(Cell("ddp", "fp32"), World(0, 1, 0, "cpu"))
    for name in REQUIRED_METHODS:
        given = [] if name == "build_model" else [None]
        with pytest.raises(NotImplementedError, match=r"^TODO: .* of train"):
            getattr(driver, name)(*given)
    monkeypatch.delitem(sys.modules, "distcompat_driver")


@pytest.mark.parametrize("code", ["", "def f():\n    pass\n", "class A:\n    def backward(self):\n        pass\n"])
def test_code_without_a_loop_gets_no_driver(tmp_path: Path, code: str) -> None:
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    main(["init", str(tmp_path)])
    assert not (tmp_path / "tests" / "distcompat_driver.py").exists()


@pytest.mark.spawn
def test_the_suite_fails_until_the_driver_is_filled_in(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP, encoding="utf-8")
    main(["init", str(tmp_path)])
    script = str(Path(sys.executable).with_name("pytest"))
    command = [script, "-p", "no:cacheprovider", "--distcompat-gpus=0", "tests", "-k", "names or parity"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NotImplementedError: TODO: return the model of train" in done.stdout
    assert " passed" not in done.stdout
