"""A report is written as a whole or not at all: what was there before survives a disk that is full."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import resource
import signal
import subprocess
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_distcompat.cli import main
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.write import FORMATS, write_report

from .conftest import REAL


@pytest.fixture
def little_space() -> Iterator[None]:
    """Files of this process may have 4 KiB. Writing more fails as on a full disk, with another number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def tiny_disk(directory: Path) -> bool:
    """Mount a file system of 64 KiB there; whether that is allowed."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(directory)]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


@pytest.mark.parametrize("suffix", [".json", ".md", ".html"])
@pytest.mark.usefixtures("little_space")
def test_an_old_report_survives_a_failed_write(suffix: str, real: Report, tmp_path: Path) -> None:
    path = tmp_path / f"report{suffix}"
    path.write_text("the old one", encoding="utf-8")
    with pytest.raises(OSError, match="File too large") as caught:
        write_report(path, real)
    assert path.read_text(encoding="utf-8") == "the old one"
    assert caught.value.filename == str(path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.usefixtures("little_space")
def test_a_failed_write_leaves_no_new_report(real: Report, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"):
        write_report(tmp_path / "report.html", real)
    assert not list(tmp_path.iterdir())


def test_on_a_full_disk_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if not tiny_disk(disk):
        pytest.skip("this user may mount nothing")
    try:
        path = disk / "report.html"
        path.write_text("the old one", encoding="utf-8")
        assert main(["report", str(REAL), "-o", str(path)]) == 2
        assert [(each.name, each.read_text(encoding="utf-8")) for each in disk.iterdir()] == [
            ("report.html", "the old one")
        ]
        assert capsys.readouterr().err == f"distcompat: {path}: {os.strerror(errno.ENOSPC)}\n"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_device_that_is_full_is_named_by_the_path_that_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "full.html"
    path.symlink_to("/dev/full")
    assert main(["merge", str(REAL), str(REAL), "-o", str(path)]) == 2
    assert capsys.readouterr().err == f"distcompat: {path}: {os.strerror(errno.ENOSPC)}\n"


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_link_stays_one_and_the_mode_is_kept(suffix: str, real: Report, tmp_path: Path) -> None:
    target = tmp_path / f"there{suffix}"
    target.write_text("the old one", encoding="utf-8")
    target.chmod(0o640)
    link = tmp_path / f"link{suffix}"
    link.symlink_to(target)
    write_report(link, real)
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert target.read_text(encoding="utf-8") != "the old one"


def test_a_new_report_has_the_mode_of_the_users_umask(real: Report, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_report(tmp_path / "r.json", real)
    finally:
        os.umask(before)
    assert (tmp_path / "r.json").stat().st_mode & 0o777 == 0o640


def test_a_pipe_or_device_is_written_to(real: Report, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        write_report(pipe, real)
        assert reader.stdout is not None
        assert reader.stdout.read().startswith("Distributed compatibility: ")


def test_json_is_written_a_verdict_at_a_time(real: Report, tmp_path: Path) -> None:
    large = dataclasses.replace(real, results=real.results * (3000 // len(real.results)))

    def write_whole(path: Path) -> None:
        path.write_text(large.to_text(), encoding="utf-8")

    peaks: dict[Path, int] = {}
    for write in (lambda path: write_report(path, large), write_whole):
        path = tmp_path / f"{len(peaks)}.json"
        tracemalloc.start()
        write(path)
        peaks[path] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    streamed, unstreamed = peaks
    assert streamed.read_bytes() == unstreamed.read_bytes()
    assert peaks[streamed] < streamed.stat().st_size / 4 < peaks[unstreamed]
