"""Check ``final_model_loadable`` on hand-made traces: names that a library changes when it saves and when it loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.checks import more_runs

from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.scripts.final_model import check_final_model
from pytest_distcompat.ext.scripts.recorder import END, STRIDE
from pytest_distcompat.trace import FileInfo, RunTrace

CELL = Cell.of("ddp", "fp32")


@pytest.fixture
def run() -> RunTrace:
    """Return the run of a script whose last step is its first."""
    train = more_runs.trace_of(CELL, "export").run("train")
    exported = [dataclasses.replace(snapshot, action="step", index=STRIDE + END) for snapshot in train.at("export")]
    return dataclasses.replace(train, snapshots=(*train.at("build_model"), *exported))


def loaded_by_the_library(**changes: Any) -> dict[str, Any]:
    """Return what the reader says of files whose names lack a segment, and of the model that the library makes of them."""
    model = more_runs.trace_of(CELL, "export").run("reload").unwrapped
    assert model is not None
    keys = tuple(name.replace(".weight", ".w") for name in model.state_dict)
    file = FileInfo("export/model.safetensors", "safetensors", "model", keys)
    answer = {
        **dict.fromkeys(("missing", "unexpected", "mismatched"), ()),
        "problem": "",
        "stored": False,
        "renamed_by_library": True,
        "files": [dataclasses.asdict(file)],
    }
    return {**answer, "unwrapped": dataclasses.asdict(model), **changes}


def findings(run: RunTrace, answer: Mapping[str, Any]) -> list[str]:
    all_findings = check_final_model(run, CELL, Path(), (), lambda request: answer, saved_name=lambda key: key)
    return [finding.partition(": ")[2] for finding in all_findings]


def test_a_library_may_rename_keys_if_it_loads_what_was_trained(run: RunTrace) -> None:
    assert findings(run, loaded_by_the_library()) == []


def test_files_that_no_library_renames_have_the_models_names(run: RunTrace) -> None:
    all_findings = findings(run, loaded_by_the_library(renamed_by_library=False))
    assert "'frozen.w' and 3 others are none of the model's own" in all_findings[0]


def test_a_library_that_loads_other_values(run: RunTrace) -> None:
    answer = loaded_by_the_library()
    for info in answer["unwrapped"]["parameters"]:
        if info["name"] == "outlet.weight":
            info["digest"] = "8:1"
    assert findings(run, answer) == ["parameter 'outlet.weight': other values after the reload"]
