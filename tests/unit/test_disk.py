"""How a full disk is known: by a file system that takes no more bytes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_distcompat.disk import full_disk_reason, is_full

ASK = (
    "import sys, pathlib; from pytest_distcompat.disk import full_disk_reason as ask; print(ask(pathlib.Path('/mnt')))"
)


@pytest.mark.parametrize(("number", "full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)])
def test_which_errors_are_of_a_full_disk(number: int, full: bool) -> None:
    assert is_full(OSError(number, os.strerror(number))) is full


def test_a_directory_with_room_gives_no_reason_and_keeps_nothing(tmp_path: Path) -> None:
    assert not full_disk_reason(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_gone_is_not_full(tmp_path: Path) -> None:
    assert not full_disk_reason(tmp_path / "gone")


def test_a_full_file_system_is_named() -> None:
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=16k none /mnt && exec "$@"', "sh"]
    done = subprocess.run([*mount, sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    if "permitted" in done.stderr:
        pytest.skip("this user may not mount anything")
    assert done.stdout == "[Errno 28] No space left on device: '/mnt'\n", done.stderr
