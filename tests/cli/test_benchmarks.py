"""Benchmarks end with a usage error where what they would print is not so."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: As if a module were not installed.
WITHOUT = """
import runpy, sys
sys.modules[sys.argv[1]] = None
sys.argv = sys.argv[2:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "module"),
    [("faults.py", "expecttest"), ("launch.py", "expecttest"), ("random_order.py", "random_order")],
)
def test_a_missing_package_of_a_benchmark_is_named(script: str, module: str) -> None:
    """The table of faults called torch's own harness wrong, which had not been started."""
    command = [sys.executable, "-c", WITHOUT, module, str(BENCHMARKS / script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"{module} is not installed: pip install --group bench" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["faults.py", "raise"], "no 'raise'; expected some of: raises, "),
        (["upstream_bugs.py", "acc-3904"], "no 'acc-3904'; expected some of: acc-1755-fsdp1-optim-args, "),
        (["warm_and_cold.py", "smoke"], "no 'smoke'; expected some of: torch, "),
        (["scripts.py", "--only", "test_op"], "no 'test_op'; expected some of: "),
        (["scripts_probe.py", "--only", "fsdp3"], "no 'fsdp3'; expected some of: ddp, "),
    ],
)
def test_an_unknown_part_of_a_benchmark_is_refused(arguments: list[str], message: str) -> None:
    command = [sys.executable, str(BENCHMARKS / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert done.stdout == ""


@pytest.fixture
def back_ends(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of benchmarks, which import from their own directory."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("back_ends")


def test_the_parameters_of_the_models(back_ends: Any) -> None:
    """As counted on a GPU: docs/cases/throughput-zero3-7b.json and -3b.json."""
    counted = {name: back_ends.SHAPES[name].parameters for name in ("7b", "3b", "bytes")}
    assert counted == {"7b": 6738415616, "3b": 3141172224, "bytes": 25960960}


@pytest.mark.parametrize(
    ("back_end", "upcast", "gib", "model"),
    [
        # An H200, an H100 and an A100 with 40 GB, all but empty; what 7b needs was measured: 107.6, 111.8 and 53.5 GiB.
        ("fsdp2", True, 139, "7b"),
        ("zero3", True, 139, "7b"),
        ("zero3", True, 111, "3b"),
        ("fsdp2", True, 79, "3b"),
        ("zero3", True, 79, "3b"),
        ("ddp", False, 79, "7b"),
        ("zero3", True, 39, "1b"),
    ],
)
def test_a_size_that_fits_the_card(back_ends: Any, back_end: str, upcast: bool, gib: int, model: str) -> None:
    """7b was tried on 80 GB at every length, for 260 s, and never fitted."""
    assert back_ends.largest_model(back_end, gib * 2**30, upcast=upcast) == model


def test_a_card_on_which_nothing_fits(back_ends: Any) -> None:
    with pytest.raises(SystemExit, match="fsdp2: 1b needs 24 GiB; 8 GiB are free"):
        back_ends.largest_model("fsdp2", 8 * 2**30, upcast=True)


#: ``launch.py`` with two ways: one that is done at once, and one that waits until it is stopped.
TWO_WAYS = """
import runpy, sys, time
sys.path.insert(0, sys.argv[1])
sys.argv = ["launch.py", "--json", sys.argv[2]]
import launch
command = [sys.executable, "-c", "import time; time.sleep(600)"]
launch.needs = lambda *_: None
launch.ways = lambda group: [
    launch.Way("done", 1, lambda where, count: [0.5]),
    launch.Way("waits", 1, lambda where, count: [launch.run(command, where)]),
]
launch.main()
"""


def test_a_benchmark_that_is_stopped_has_written_what_it_has(tmp_path: Path) -> None:
    """On a GPU it had written nothing in 230 s."""
    path = tmp_path / "figures.json"
    command = [sys.executable, "-c", TWO_WAYS, str(BENCHMARKS), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line == "round 1: done: 0.500 s\n"
        assert json.loads(path.read_text(encoding="utf-8"))["seconds"] == {"done": [0.5], "waits": []}
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "| done | 1 | 0.500 |" in output
    assert "waits" not in output
    assert "stopped: these are the figures so far" in errors


def test_branches_of_its_own_are_those_that_no_other_cell_executes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    profile_cells = importlib.import_module("profile_cells")
    branches_by_cell = {"torch/ddp-fp32-w2": {(0, 1), (0, 2)}, "torch/fsdp2-fp32-w2": {(0, 2), (1, 2)}}
    results = [
        {"driver": "torch", "cell": "ddp-fp32-w2", "seconds": 2.0},
        {"driver": "torch", "cell": "ddp-fp32-w2", "seconds": None},
        {"driver": "torch", "cell": "fsdp2-fp32-w2", "seconds": 0.5},
        {"driver": "torch", "cell": "fsdp1-fp32-w2", "seconds": 1.0},
    ]
    ddp, fsdp2, untraced = profile_cells.cell_values(branches_by_cell, {"results": results})
    assert ddp.branches == 2
    assert ddp.own == 1
    assert ddp.seconds == 2.0
    assert ddp.verdicts == 2
    assert fsdp2.own == 1
    assert fsdp2.own_per_second == 2.0
    assert untraced.branches == 0
    assert untraced.own == 0


TRAINER = """
def step(self, batch):
    self.steps += 1
    logger.info("step %s", self.steps)
    if batch is None and self.first < 2:
        self.feed(batch, drop=True)
    loss = self.model(batch) / 2
    return loss
"""


def test_random_changes_change_one_place_of_what_is_computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    path = tmp_path / "trainer.py"
    path.write_text(TRAINER, encoding="utf-8")
    source = importlib.import_module("random_changes").Source(path)
    changed_lines = []
    for edit in source.edits():
        lines = source.changed(edit).splitlines()
        (line,) = set(lines) - set(TRAINER.splitlines())
        changed_lines.append(f"{edit.kind}: {line.strip()}")
    assert sorted(changed_lines) == [
        "argument left out: self.feed(batch, )",
        "condition negated: if not (batch is None and self.first < 2):",
        "number: if batch is None and self.first < 3:",
        "number: loss = self.model(batch) / 3",
        "number: self.steps += 2",
        "operator: if batch is None and self.first <= 2:",
        "operator: if batch is None or self.first < 2:",
        "operator: if batch is not None and self.first < 2:",
        "operator: loss = self.model(batch) * 2",
        "statement left out: pass",
        "statement left out: pass",
        "truth value: self.feed(batch, drop=False)",
    ]
