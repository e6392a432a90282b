"""``distcompat trace``: one cell, really trained, as tables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pytest_distcompat import clock
from pytest_distcompat.cli import main

DRIVER = """
from pytest_distcompat.drivers.torch import TorchDriver

class Mine(TorchDriver):
    name = "mine"

    def step(self, number):
        if number == 2 and self.world.rank == 1:
            raise ValueError("rank 1 has had enough")
        return super().step(number)
"""


@pytest.mark.spawn
def test_a_cell_as_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--check", "names", "--check", "dtypes", "--check", "float8", "--check", "throughput"]
    arguments = [*options, "--device", "cpu", "--keep", str(tmp_path / "kept")]
    assert main(["trace", "torch", "fsdp2-bf16_upcast-w2-model_mlp", *arguments]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "fsdp2-bf16_upcast-w2-model_mlp (driver torch)"
    assert "wrappers 3 x FSDP2; 2 ranks over gloo" in lines[1]
    assert lines[2].startswith("optimizer AdamW; 12 entries on rank 0, 0 foreign; keeps ")
    # 13 rows over two ranks: 7 and 6.
    assert "inlet.weight 13 x 7 = bfloat16 bfloat16 DTensor dp_shard=Shard(0) 49|42 1 2" in lines
    assert "master float32 bfloat16 differs" in lines
    assert "compute bfloat16 bfloat16" in lines
    assert "20" in {line.split()[0] for line in lines if line}
    assert "check names: passed" in lines
    # As in the suite: plain torch is known not to upcast.
    place = lines.index("check dtypes: known")
    assert "never upcasts" in lines[place + 1]
    # As in the suite: there is no such item.
    assert lines[lines.index("check float8: not applicable") + 1] == "bf16_upcast has no 8-bit layers"
    assert "check throughput: not applicable" in lines
    assert list((tmp_path / "kept").glob("*/run.json"))


@pytest.mark.nightly
@pytest.mark.spawn
def test_a_cell_that_breaks_off_shows_how_far_it_got(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "driver_that_has_enough.py").write_text(DRIVER, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["trace", "driver_that_has_enough:Mine", "ddp-fp32-w2", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "1 x DDP" in out
    assert "raised in step: rank 1 raised ValueError: rank 1 has had enough" in out
    assert 'raise ValueError("rank 1 has had enough")' in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["torch", "fsdp2"], "'fsdp2' is no cell id"),
        (["torch", "fsdp3-fp32-w2"], "no strategy named 'fsdp3'. Known: ddp"),
        (["torch", "ddp-bf16-w2"], "distcompat: no precision named 'bf16'. Known: fp32"),
        (["nothing", "ddp-fp32-w2"], "no driver named 'nothing'. Known: torch"),
        (["torch", "zero3-fp32-w2"], "zero3-fp32-w2: plain torch has no zero3"),
        (["torch", "ddp-fp32-w2", "--check", "nothing"], "no check named 'nothing'. Known: "),
        (["torch", "ddp-fp32-w64", "--device", "cuda"], "device cuda: 64 ranks need 64 GPUs"),
        (["torch", "ddp-fp32-w2", "--timeout", "0"], "--timeout 0 is not right: expected a number of seconds above 0"),
        (["torch", "ddp-fp32-w2", "--timeout", "-1"], "--timeout -1 is not right"),
        (["torch", "ddp-fp32-w2", "--keep", __file__], f"--keep {__file__}: File exists"),
    ],
)
def test_a_cell_that_cannot_be_traced_has_the_reason(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *arguments]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.spawn
@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_ends_a_trace_leaves_nothing(number: int, tmp_path: Path) -> None:
    """As the time limit of a CI job."""
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "from pytest_distcompat.drivers.torch import TorchDriver\n\n"
        "class Slow(TorchDriver):\n"
        "    name = 'slow'\n\n"
        "    def step(self, number):\n"
        "        pathlib.Path('reached').touch()\n"
        "        time.sleep(100)\n",
        encoding="utf-8",
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        command = [sys.executable, "-m", "pytest_distcompat.cli", "trace", "slow:Slow", "ddp-fp32-w1"]
        environment = {**os.environ, "TMPDIR": temporary}
        trace = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        try:
            assert clock.wait_until((tmp_path / "reached").exists, 60)
        finally:
            trace.send_signal(number)
            code = trace.wait()
        if number == signal.SIGTERM:
            assert code == 128 + signal.SIGTERM
        else:
            # Another session removes it.
            owner = "from pytest_distcompat.launch.temporary import OwnedDirectory; OwnedDirectory()"
            subprocess.run([sys.executable, "-c", owner], env=environment, check=True)
        names = [path.name for path in Path(temporary).iterdir()]
        # Leases stay for the next session, and torch has a cache of its own.
        assert [name for name in names if "distcompat-" in name and "-leases-" not in name] == []
