"""What ranks find that are started again by hand."""

from __future__ import annotations

import dataclasses
from concurrent import futures
from pathlib import Path

import pytest

from pytest_distcompat.places import Places
from pytest_distcompat.scenario import DAMAGED_RUNS, RELOAD_RUN, RESUME_RUN, TRAIN_RUN, Run


def files(directory: Path) -> dict[str, str]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text(encoding="utf-8") for path in found}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """As a run left them: each has a file of it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    found = Places(tmp_path / "run" / "saved", tmp_path / "earlier" / "saved", tmp_path / "run" / "export", 2)
    for directory in (found.save_to, found.load_from, found.export):
        directory.mkdir(parents=True)
        (directory / "shard").write_text(directory.parent.name, encoding="utf-8")
    return found


def both(places: Places, run: Run) -> None:
    """Rank 1 comes first."""
    directory = places.save_to.parent
    with futures.ThreadPoolExecutor() as ranks:
        waits = ranks.submit(places.clear, run, 1, directory)
        with pytest.raises(futures.TimeoutError):
            waits.result(0.1)
        places.clear(run, 0, directory)
        waits.result(10)


def test_what_a_run_writes_is_gone_before_any_rank_goes_on(places: Places) -> None:
    both(places, TRAIN_RUN)
    assert places.save_to.is_dir()
    assert files(places.save_to) == files(places.export) == {}
    assert files(places.load_from) == {"shard": "earlier"}


@pytest.mark.parametrize("run", [RESUME_RUN, RELOAD_RUN], ids=lambda run: run.name)
def test_what_another_run_wrote_stays(places: Places, run: Run) -> None:
    both(places, run)
    assert files(places.load_from) == {"shard": "earlier"}
    assert files(places.export) == {"shard": "run"}


@pytest.mark.parametrize("run", DAMAGED_RUNS, ids=lambda run: run.name)
def test_what_is_damaged_is_a_copy_again(places: Places, run: Run) -> None:
    both(places, run)
    assert files(places.save_to) == files(places.load_from) == {"shard": "earlier"}


def test_a_run_that_loads_what_it_saved(places: Places) -> None:
    both(dataclasses.replace(places, load_from=places.save_to), TRAIN_RUN)
    assert files(places.save_to) == {}


def test_each_start_waits_for_its_own(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    both(places, TRAIN_RUN)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "third")
    both(places, TRAIN_RUN)
