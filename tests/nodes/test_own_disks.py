"""The directories of runs that each node has below one of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_distcompat.ext.cluster.own_disks import on_node
from pytest_distcompat.run_paths import RunPaths, SuitePayload
from pytest_distcompat.scenario import RESUME_RUN, TRAIN_RUN, Run


def files(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text(encoding="utf-8") for path in files}


def payload(run: Run, *names: str) -> SuitePayload:
    save_to, load_from, export = (f"/store/{name}" for name in names)
    return SuitePayload("torch", "ddp-fp32-w2-n2", 2, "cpu", run, save_to, load_from, export, own_disks=True)


def test_a_node_has_its_own_directories(tmp_path: Path) -> None:
    own, train = tmp_path / "runs", Path("/store/train")
    saved = on_node(payload(TRAIN_RUN, "train/saved", "train/saved", "train/export"), train, own).paths
    assert saved == RunPaths(own / "train" / "saved", own / "train" / "saved", own / "train" / "export", 2)
    (saved.save_to / "shard").write_text("whole", encoding="utf-8")
    resume = on_node(
        payload(RESUME_RUN, "resume/saved", "train/saved", "train/export"), Path("/store/resume"), own
    ).paths
    assert files(resume.load_from) == {"shard": "whole"}
    assert files(resume.save_to) == {}
    # Run again, it finds nothing of the first time.
    on_node(payload(TRAIN_RUN, "train/saved", "train/saved", "train/export"), train, own)
    assert files(saved.save_to) == {}


def test_a_node_that_was_lost_since_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="the node was lost since run 'train', whose files were there"):
        on_node(payload(RESUME_RUN, "resume/saved", "train/saved", "train/export"), Path("/store/resume"), tmp_path)
