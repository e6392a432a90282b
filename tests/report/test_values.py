"""Values of a training in float32: what is kept of them, and what differs between two reports."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.cli import main
from pytest_distcompat.evidence.values import values_of
from pytest_distcompat.report.compare import compare
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.result import Row
from pytest_distcompat.report.values import Extent, ValueChange, value_changes, value_lines
from pytest_distcompat.report.write import write_report
from pytest_distcompat.trace import (
    FileInfo,
    ModelInfo,
    ParameterInfo,
    RunTrace,
    Snapshot,
    StepInfo,
    UnwrappedInfo,
)

CELL = Cell.parse("ddp-fp32-w2")
UNWRAPPED = UnwrappedInfo((ParameterInfo("a", (4,), "float32"),), state_dict=("a",))


def trained(digest: str = "4:7", *, cell: Cell = CELL, loss: float = 1.0, keys: tuple[str, ...] = ("a",)) -> RunTrace:
    """Two ranks hold the same parameter, take a step and save."""
    snapshots = []
    for rank in range(2):
        parameter = ParameterInfo("a", (4,), "float32", local_numel=4, digest=digest)
        model = ModelInfo("M", {}, (parameter,))
        step = StepInfo("SGD", (), (), (), square=0.5, param_groups=({"lr": 0.1},))
        snapshots += [
            Snapshot(rank, "train", "build_model", 0, unwrapped=UNWRAPPED),
            Snapshot(rank, "train", "build", 1, model=dataclasses.replace(model, parameters=(parameter,))),
            Snapshot(rank, "train", "step", 2, loss=loss, grad_norm=3.0, model=model, steps=(step,)),
            Snapshot(rank, "train", "step", 3, loss=loss, grad_norm=3.0, steps=(step,)),
            Snapshot(rank, "train", "evaluate", 4, outputs=(0.25, float("nan"))),
        ]
    files = (FileInfo("model.pt", "torch", "model", keys),)
    snapshots.append(Snapshot(0, "train", "files", 5, files=files))
    return RunTrace("train", 2, tuple(snapshots), cell=cell.id)


def test_what_is_kept() -> None:
    values = values_of(CELL, trained())
    assert list(values["digests"]) == ["build parameter", "step 1 parameter"]
    assert values["numbers"] == {
        "loss": [2.0, 2.0],
        "grad_norm": [3.0, 3.0],
        "gradients": [1.0, 1.0],
        "lr": [0.1, 0.1],
        "outputs": [0.25, None],
    }
    assert values["files"]["model.pt"].startswith("torch model ")
    assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_other_precisions_keep_nothing() -> None:
    """In bfloat16 a change of the last bit is one in the third digit."""
    cell = Cell.parse("ddp-bf16_mixed-w2")
    assert values_of(cell, trained(cell=cell)) == {}


def report(values: dict[str, Any], **more: Any) -> Report:
    return Report(rows=[Row("S", "d", CELL.id, values=values, **more)])


def changed(before: RunTrace, after: RunTrace, **more: Any) -> list[tuple[Extent, str]]:
    earlier = report(values_of(CELL, before))
    later = report(values_of(CELL, after), **more)
    return [(change.extent, change.what) for change in value_changes(earlier, later)]


def first_change(before: dict[str, Any], after: dict[str, Any], **more: Any) -> ValueChange:
    """Return the change between two reports with these values, of which there is one."""
    (change,) = value_changes(report(before), report(after, **more))
    return change


def test_equal_values_are_no_news() -> None:
    assert changed(trained(), trained()) == []


def test_a_last_bit_is_news() -> None:
    """No number of a step shows it."""
    assert changed(trained("4:7"), trained("4:8")) == [
        (Extent.ROUNDED, "build parameter; no number of a step shows it")
    ]


@pytest.mark.parametrize(
    ("losses", "allowed", "extent"),
    [
        ([2 + 1e-8, 2.0], None, Extent.ROUNDED),
        ([2.0, 2 + 1e-4], None, Extent.BEYOND),
        # Where parity would allow it, too: nothing has enlarged it yet.
        ([2 + 1e-4, 2.0], [1e-3, 1e-3], Extent.BEYOND),
        ([2 + 1e-8, 2 + 1e-5], None, Extent.ROUNDED),
        ([2 + 1e-8, 2 + 1e-3], None, Extent.BEYOND),
        ([2 + 1e-8, 2 + 1e-3], [1e-2, 1e-2], Extent.ROUNDED),
        ([2 + 1e-8, 2 + 1e-3], [1e-2, 1e-5], Extent.BEYOND),
    ],
)
def test_later_steps_may_differ_by_what_parity_allows(
    losses: list[float], allowed: list[float | None] | None, extent: Extent
) -> None:
    """The first that differs may not."""
    before = values_of(CELL, trained())
    after = values_of(CELL, trained())
    after["numbers"]["loss"] = losses
    steps = {} if allowed is None else {"loss_tolerance": allowed}
    change = first_change(before, after, steps=steps)
    assert change.extent is extent
    assert change.first.startswith("loss of step ")


def test_a_loss_that_is_no_number_any_more_is_beyond_rounding() -> None:
    assert changed(trained(), trained(loss=float("nan"))) == [
        (Extent.BEYOND, "loss of step 1; numbers differ by up to 1 of them")
    ]


def test_what_differs_first_is_named() -> None:
    """A digest of the first step comes before a number of the second."""
    before = values_of(CELL, trained())
    after = values_of(CELL, trained())
    after["numbers"]["loss"][1] = 2.5
    assert first_change(before, after).first == "loss of step 2"
    after["digests"]["step 1 parameter"] = "other"
    assert first_change(before, after).first == "step 1 parameter"
    after["numbers"]["loss"][0] = 2.5
    assert first_change(before, after).first == "loss of step 1"
    outputs = values_of(CELL, trained())
    outputs["numbers"]["outputs"][0] = 0.5
    assert first_change(before, outputs).first == "the outputs of the trained model"


def test_a_format_is_news_of_its_own() -> None:
    other_keys = trained(keys=("b",))
    assert changed(trained(), other_keys) == [(Extent.FORMAT, "model.pt has other keys, shapes or dtypes")]
    before = values_of(CELL, trained())
    after = values_of(CELL, trained())
    after["files"] = {f"{number}.pt": "torch model x" for number in range(3)}
    change = first_change(before, after)
    assert change.what == "model.pt is gone, 0.pt is new, 1.pt is new and 1 more"


def test_only_cells_of_both_reports_are_compared() -> None:
    values = values_of(CELL, trained())
    assert value_changes(Report(), report(values)) == []
    assert value_changes(report({}), report(values)) == []
    assert value_changes(report(values), report({})) == []


def test_the_lines_group_what_differs_alike() -> None:
    before = Report()
    after = Report()
    for number in range(5):
        cell = f"c{number}"
        before.rows.append(Row("S", "d", cell, values=values_of(CELL, trained())))
        after.rows.append(Row("S", "d", cell, values=values_of(CELL, trained("4:8"))))
    after.rows[4].values = values_of(CELL, trained(loss=2.0))
    changes = value_changes(before, after)
    assert list(value_lines(changes)) == [
        "values changed beyond rounding: 1 cell",
        "  loss of step 1; numbers differ by up to 0.5 of them: c4 (d)",
        "values changed within rounding: 4 cells",
        "  build parameter; no number of a step shows it: c0 (d), c1 (d), c2 (d) and 1 more",
    ]


def test_diff_shows_them_apart_from_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are news where every law holds, and no failure."""
    last = tmp_path / "last.json"
    today = tmp_path / "today.json"
    write_report(last, report(values_of(CELL, trained("4:7"))))
    write_report(today, report(values_of(CELL, trained("4:8"))))
    assert main(["diff", str(last), str(today)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "values changed within rounding: 1 cell",
        "  build parameter; no number of a step shows it: ddp-fp32-w2 (d)",
    ]
    comparison = compare(Report.read(last), Report.read(today))
    assert comparison.to_json("last.json")["values"] == [
        {
            "driver": "d",
            "cell": "ddp-fp32-w2",
            "extent": "rounded",
            "what": "build parameter; no number of a step shows it",
        }
    ]


TWIN = """
import os
import torch
from pytest_distcompat import CompatSuite, Matrix
from pytest_distcompat.drivers.torch import TorchDriver

class Twin(TorchDriver):
    name = "twin"

    def build(self, model):
        super().build(model)
        if os.environ.get("TWIN") == "factor":
            # What parity allows.
            for parameter in self.model.parameters():
                parameter.register_hook(lambda gradient: gradient * 1.00001)

    def step(self, number):
        loss = super().step(number)
        if os.environ.get("TWIN") == "bit" and number == 1:
            values = next(self.model.parameters()).detach().view(-1)
            values[0] = torch.nextafter(values[0], torch.tensor(9.0))
        return loss

    def export(self, directory):
        super().export(directory)
        if os.environ.get("TWIN") == "format" and self.world.rank == 0:
            (file,) = directory.glob("*.safetensors")
            from safetensors.torch import load_file
            torch.save(load_file(file), directory / "pytorch_model.bin")

class TestTwin(CompatSuite):
    driver = "test_twin:Twin"
    matrix = Matrix(strategies=("ddp",), precisions=("fp32",), world_sizes=(2,))
"""


@pytest.mark.nightly
@pytest.mark.spawn
def test_twins_of_a_driver_are_told_apart(tmp_path: Path) -> None:
    """A last bit, a small factor, and a format; the same driver twice is no news."""
    (tmp_path / "test_twin.py").write_text(TWIN, encoding="utf-8")
    options = ["-k", "active or parity", "--distcompat-gpus=0", "-p", "no:cacheprovider"]
    reports = {}
    for twin in ("sound", "again", "bit", "factor", "format"):
        path = tmp_path / f"{twin}.json"
        command = [sys.executable, "-m", "pytest", "test_twin.py", "-q", *options, f"--distcompat-report={path}"]
        environment = {**os.environ, "TWIN": twin}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        reports[twin] = Report.read(path)

    def first_changes(twin: str) -> dict[Extent, str]:
        changes = value_changes(reports["sound"], reports[twin])
        return {change.extent: change.first for change in changes}

    assert first_changes("again") == {}
    assert first_changes("bit") == {Extent.ROUNDED: "step 2 parameter"}
    assert first_changes("factor") == {Extent.BEYOND: "grad_norm of step 1"}
    assert first_changes("format") == {Extent.FORMAT: "export/pytorch_model.bin is new"}
