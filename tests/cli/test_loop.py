"""The driver that ``init`` writes around a plain training loop: what it reads, and what it asks for."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.cli import main
from pytest_distcompat.cli.loop import scaffold
from pytest_distcompat.world import World

LOOP = """
import argparse
import os

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x):
        return self.layers(x)


def data(rows):
    x = torch.arange(4.0 * rows).reshape(rows, 4) / rows
    return TensorDataset(x, x[:, :2])


def train_epoch(model, loader, optimizer, criterion, device, clip=1.0):
    model.train()
    total = 0.0
    for i, (x, y) in enumerate(loader):
        x, y = x.to(device), y.cuda()
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        total += loss.item()
        if i % 10 == 0:
            print(total)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    torch.distributed.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    net = Net(8).to(device)
    net = DDP(net, device_ids=[rank])
    dataset = data(64)
    loader = DataLoader(dataset, batch_size=args.batch_size)
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
    criterion = nn.MSELoss()
    for epoch in range(3):
        train_epoch(net, loader, opt, criterion, device)
        torch.save({"model": net.module.state_dict(), "optimizer": opt.state_dict(), "epoch": epoch}, "last.pt")


if __name__ == "__main__":
    main()
"""


def source(code: str, module: str = "train") -> str:
    found = scaffold(ast.parse(code), module)
    assert found is not None
    ast.parse(found.source)
    return found.source


def methods(code: str) -> dict[str, str]:
    (made,) = (one for one in ast.parse(source(code)).body if isinstance(one, ast.ClassDef))
    return {one.name: ast.unparse(one) for one in made.body if isinstance(one, ast.FunctionDef)}


def test_a_torch_loop_fills_every_method() -> None:
    found = methods(LOOP)
    assert list(found) == ["build_model", "build", "make_optimizer", "batch", "step", "loss", "save", "load"]
    assert "NotImplementedError" not in source(LOOP)
    assert "max_norm = 1.0" in source(LOOP)
    assert "from train import Net" in found["build_model"]
    assert "net = Net(8)\n" in found["build_model"], "neither moved nor wrapped"
    assert "model = DDP(model)\n" in found["build"], "without the GPU's number"
    assert "AdamW(model.parameters(), lr=0.001)" in found["make_optimizer"], "the default of --lr"
    assert "dataset = data(64)" in found["batch"]
    assert "(8,)" in found["batch"], "the default of --batch-size"
    assert "y.to(self.world.device)" in found["step"]
    assert "self.total += loss.item()" in found["step"]
    assert "print" not in found["step"]
    assert "epoch" not in found["save"], "what a driver does not know"
    assert "self.optimizer.load_state_dict(state['optimizer'])" in found["load"]


def test_the_methods_of_the_generated_driver_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "plain_loop.py").write_text(LOOP, encoding="utf-8")
    (tmp_path / "plain_driver.py").write_text(source(LOOP, "plain_loop"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    driver: Any = importlib.import_module("plain_driver").LoopDriver(Cell("ddp", "fp32"), World(0, 1, 0, "cpu"))
    model = driver.build_model()
    first = [driver.reference(model, number, 2) for number in range(3)]
    assert first[0] > 0 < driver.grad_norm
    driver.model, driver.criterion, driver.clip, driver.total = (
        model,
        importlib.import_module("torch.nn").MSELoss(),
        1.0,
        0.0,
    )
    expected = driver.loss(model, 3, 0).item()
    assert driver.step(3) == pytest.approx(expected)


def test_unreadable_parts_raise_not_implemented_error() -> None:
    code = """
def train(model, cfg):
    optimizer = make(model.parameters(), cfg.lr)
    for batch in stream(cfg):
        loss = model(batch)
        loss.backward()
        optimizer.step()
"""
    found = methods(code)
    assert "write what model of train should be here" in found["build_model"]
    assert "write what cfg, make of train should be here" in found["make_optimizer"]
    assert "return batch `number` of a rank, as `stream(cfg)` yields it" in found["batch"]
    assert "saves nothing to resume from" in found["save"]
    assert "DistributedDataParallel(model)" in found["build"]
    assert "wraps its model in no strategy" in source(code)


def test_a_script_without_a_guard_is_not_imported_from() -> None:
    code = (
        LOOP.partition("def train_epoch")[0]
        + """
net = Net(8)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in DataLoader(data(8)):
    loss = (net(x) - y).square().mean()
    loss.backward()
    opt.step()
"""
    )
    assert "train trains when it is imported: put that below if __name__" in methods(code)["build_model"]


@pytest.mark.parametrize(
    ("wrap", "strategies"),
    [
        ("net = DDP(net)", ("ddp",)),
        ("fully_shard(net)", ("fsdp2",)),
        ("net = FullyShardedDataParallel(net)", ("fsdp1",)),
        ("if args.sharded:\n        fully_shard(net)", ("fsdp2",)),
        ("pass", ("ddp",)),
    ],
)
def test_the_strategy_is_the_loops_own(wrap: str, strategies: tuple[str, ...]) -> None:
    found = scaffold(ast.parse(LOOP.replace("net = DDP(net, device_ids=[rank])", wrap)), "train")
    assert found is not None
    assert found.strategies == strategies
    assert ("fully_shard(model)" in found.source) == ("fully_shard" in wrap)


@pytest.mark.parametrize(
    ("code", "precision"),
    [
        ("with torch.autocast('cpu', torch.bfloat16):\n            loss = criterion(model(x), y)", "bf16_mixed"),
        ("loss = criterion(model(x), y)", "fp32"),
    ],
)
def test_the_precision_is_the_loops_own(code: str, precision: str) -> None:
    found = scaffold(ast.parse(LOOP.replace("loss = criterion(model(x), y)", code)), "train")
    assert found is not None
    assert found.precision == precision
    assert found.source.count("autocast") == (precision != "fp32"), "in the step, not in the reference"


def test_a_scheduler_is_stepped_and_made() -> None:
    code = LOOP.replace("optimizer.step()", "optimizer.step()\n        sched.step()").replace(
        "criterion, device", "criterion, device, sched"
    )
    code = code.replace("    criterion = nn", "    sched = torch.optim.lr_scheduler.StepLR(opt, 2)\n    criterion = nn")
    found = methods(code)
    assert "StepLR(optimizer, 2)" in found["make_scheduler"]
    assert "self.scheduler.step()" in found["step"]


@pytest.mark.parametrize("code", ["", "def f():\n    pass\n", "class A:\n    def f(self):\n        loss.backward()\n"])
def test_code_without_a_torch_loop_gets_no_driver(code: str) -> None:
    assert scaffold(ast.parse(code), "train") is None


def test_init_writes_it_beside_the_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(LOOP, encoding="utf-8")
    assert main(["init", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "wrote tests/distcompat_driver.py" in printed
    assert "tests/distcompat_driver.py was read out of train: check it; it has 0 TODO" in printed
    suite = (tmp_path / "tests" / "test_distcompat.py").read_text(encoding="utf-8")
    assert 'driver = "distcompat_driver:LoopDriver"' in suite
    assert 'Matrix(strategies=("ddp",), precisions=("fp32",))' in suite
    assert "pythonpath = ." in (tmp_path / "pytest.ini").read_text(encoding="utf-8")


DRAWS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 2)), batch_size=8)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""


@pytest.mark.spawn
@pytest.mark.nightly
@pytest.mark.parametrize(
    "loop", [pytest.param(LOOP, id="wrapped"), pytest.param(DRAWS, id="of one process, draws rows")]
)
def test_from_a_torch_loop_to_the_first_matrix(tmp_path: Path, loop: str) -> None:
    (tmp_path / "train.py").write_text(loop, encoding="utf-8")
    main(["init", str(tmp_path)])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--distcompat-gpus=0",
        "--distcompat-report=r.json",
    ]
    done = subprocess.run([*command, "tests"], cwd=tmp_path, capture_output=True, text=True, check=False)
    data = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    found = {one["check"]: one["status"] for one in data["results"]}
    assert {name for name, status in found.items() if status == "passed"} >= {
        "active",
        "names",
        "resume",
        "parity",
        "clipping",
    }, done.stdout
