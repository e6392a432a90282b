"""What remains of a run whose files are removed before the session ends."""

from __future__ import annotations

from pathlib import Path

from pytest_distcompat.launch.files import recorded_file, recorded_files, remove_all_but_recorded


def test_recordings_of_a_removed_run_remain(tmp_path: Path) -> None:
    """The map of a session with walks needs them: many walks would fill the disk with checkpoints."""
    recordings = [recorded_file(tmp_path, "reach", rank) for rank in (0, 1)]
    for path in recordings:
        path.write_text("{}", encoding="utf-8")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(b"0")
    (tmp_path / "rank-0.jsonl").write_text("", encoding="utf-8")
    remove_all_but_recorded(tmp_path)
    assert sorted(tmp_path.iterdir()) == recordings
    assert recorded_files(tmp_path) == recordings


def test_a_run_that_never_began_has_nothing_to_remove(tmp_path: Path) -> None:
    remove_all_but_recorded(tmp_path / "none")
