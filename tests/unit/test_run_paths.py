"""Files that ranks find when a user starts them again by hand."""

from __future__ import annotations

import dataclasses
from concurrent import futures
from pathlib import Path

import pytest

from pytest_distcompat.calls import REFERENCE_CALL
from pytest_distcompat.cell import Cell
from pytest_distcompat.corrupt import corrupt
from pytest_distcompat.run_paths import RunPaths, SuitePayload
from pytest_distcompat.scenario import (
    BLOCKED_RUN,
    DAMAGED_RUNS,
    REFERENCE_RUN,
    RELOAD_RUN,
    RESUME_RUN,
    ROUNDED_RUN,
    TRAIN_RUN,
    Run,
)


def files(directory: Path) -> dict[str, str]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture
def run_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """Directories after a finished run, each with a file that names its run."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    made_paths = RunPaths(tmp_path / "run" / "saved", tmp_path / "earlier" / "saved", tmp_path / "run" / "export", 2)
    for directory in (made_paths.save_to, made_paths.load_from, made_paths.export):
        directory.mkdir(parents=True)
        (directory / "shard").write_text(directory.parent.name, encoding="utf-8")
    return made_paths


def clear_on_both_ranks(run_paths: RunPaths, run: Run) -> None:
    """Clear the directories on two ranks; rank 1 comes before rank 0 and must wait for it."""
    directory = run_paths.save_to.parent
    with futures.ThreadPoolExecutor() as ranks:
        waits = ranks.submit(run_paths.clear, run, directory, first=False)
        with pytest.raises(futures.TimeoutError):
            waits.result(0.1)
        run_paths.clear(run, directory, first=True)
        waits.result(10)


def test_the_output_of_an_earlier_run_is_removed_before_ranks_start(run_paths: RunPaths) -> None:
    clear_on_both_ranks(run_paths, TRAIN_RUN)
    assert run_paths.save_to.is_dir()
    assert files(run_paths.save_to) == files(run_paths.export) == {}
    assert files(run_paths.load_from) == {"shard": "earlier"}


@pytest.mark.parametrize(
    ("run", "world_size"),
    [
        (REFERENCE_RUN, 4),
        (ROUNDED_RUN, 4),
        (Run("walk-1-reference", ("build_model", f"{REFERENCE_CALL}step"), world_size=1), 4),
        (RELOAD_RUN, 1),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_reference_has_a_cell_of_all_ranks(run: Run, world_size: int) -> None:
    cell = run.cell(Cell("fsdp2", "fp32", 4))
    payload = SuitePayload("torch", cell.id, 4, "cpu", run, "", "", "")
    assert payload.driver_cell == dataclasses.replace(cell, world_size=world_size)


@pytest.mark.parametrize("run", [RESUME_RUN, RELOAD_RUN], ids=lambda run: run.name)
def test_files_of_another_run_stay(run_paths: RunPaths, run: Run) -> None:
    clear_on_both_ranks(run_paths, run)
    assert files(run_paths.load_from) == {"shard": "earlier"}
    assert files(run_paths.export) == {"shard": "run"}


@pytest.mark.parametrize("run", DAMAGED_RUNS, ids=lambda run: run.name)
def test_a_checkpoint_is_copied_again_before_it_is_corrupted(run_paths: RunPaths, run: Run) -> None:
    clear_on_both_ranks(run_paths, run)
    assert files(run_paths.save_to) == files(run_paths.load_from) == {"shard": "earlier"}


def test_a_file_in_the_place_of_the_directory_is_removed(run_paths: RunPaths) -> None:
    (run_paths.save_to / "shard").unlink()
    corrupt(run_paths.save_to, "block")
    assert run_paths.save_to.is_file()
    clear_on_both_ranks(run_paths, BLOCKED_RUN)
    assert run_paths.save_to.is_dir()
    assert files(run_paths.save_to) == {}


def test_a_run_that_loads_what_it_saved(run_paths: RunPaths) -> None:
    clear_on_both_ranks(dataclasses.replace(run_paths, load_from=run_paths.save_to), TRAIN_RUN)
    assert files(run_paths.save_to) == {}


def test_each_start_waits_for_its_own(run_paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    clear_on_both_ranks(run_paths, TRAIN_RUN)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "third")
    clear_on_both_ranks(run_paths, TRAIN_RUN)
