"""Not collected here: test_output.py copies it and runs it on real ranks, which write much, oddly, or cannot write at all."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.faults_group import meet, test_well, two  # noqa: F401 - a test of this module too

MUCH = 30 * 2**20
FLOOD = 100 * 2**20
LARGE = 4 * 2**20


def test_memory_of_the_parent_before(record_property: Callable[[str, object], None]) -> None:
    record_property("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@two
def test_flood(rank: int, capfd: pytest.CaptureFixture[str], process_group: Any) -> None:
    if rank == 1:
        line = b"x" * (2**16 - 1) + b"\n"
        for _ in range(FLOOD // len(line)):
            os.write(1, line)
        with capfd.disabled():
            for _ in range(FLOOD // len(line)):
                os.write(1, line)
        raise ValueError("after the flood")
    meet()


@two
def test_a_result_of_a_gigabyte(rank: int, record_property: Callable[[str, object], None]) -> None:
    if rank == 0:
        record_property("large", f"begin{'x' * 2**30}end")


def test_memory_of_the_parent_after(record_property: Callable[[str, object], None]) -> None:
    record_property("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@two
def test_much_and_pass(rank: int, process_group: Any) -> None:
    if rank == 1:
        for _ in range(MUCH // 2**16):
            print("x" * (2**16 - 1))
    meet()


@two
def test_much_and_fail(rank: int, process_group: Any) -> None:
    if rank == 1:
        for _ in range(MUCH // 2**16):
            print("x" * (2**16 - 1))
        print("the end of much")
        raise ValueError("after much")
    meet()


@two
def test_much_past_the_capture(rank: int, capfd: pytest.CaptureFixture[str], process_group: Any) -> None:
    if rank == 1:
        with capfd.disabled():
            for _ in range(MUCH // 2**16):
                os.write(1, b"x" * (2**16 - 1) + b"\n")
            os.write(1, b"the end of much\n")
        os._exit(3)
    meet()


@two
def test_binary(rank: int, process_group: Any) -> None:
    if rank == 1:
        for descriptor in (1, 2):
            os.write(descriptor, bytes(range(256)) * 4)
        raise ValueError("after binary \x00\x1b[31m")
    meet()


@two
def test_closed(rank: int, process_group: Any) -> None:
    if rank == 1:
        os.close(1)
        os.close(2)
        raise ValueError("after closing")
    meet()


@two
def test_all_closed(rank: int) -> None:
    if rank == 1:
        # Ours among them: nothing can be reported any more.
        os.closerange(0, 256)


@two
def test_streams_gone(rank: int, process_group: Any) -> None:
    if rank == 1:
        sys.stdout.close()
        sys.stderr = None
        raise ValueError("after closing")
    meet()


@two
def test_no_more_files(rank: int, process_group: Any) -> None:
    if rank == 1:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        raise ValueError("without files")
    meet()


@two
def test_banner_and_pass(rank: int, capfd: pytest.CaptureFixture[str], process_group: Any) -> None:
    library = ctypes.CDLL(None)
    library.puts(b'{"event": "done", "rank": 1}')
    library.fflush(None)
    with capfd.disabled():
        library.puts(b'{"event": "error", "rank": 1, "kind": "banner", "message": "of a library", "text": ""}')
        library.fflush(None)
    meet()


@two
def test_large_property(rank: int, record_property: Callable[[str, object], None]) -> None:
    if rank == 0:
        record_property("large", "x" * LARGE)


@two
def test_large_exception(rank: int, process_group: Any) -> None:
    if rank == 1:
        raise ValueError("x" * LARGE)
    meet()


@two
def test_unpicklable_results(rank: int, record_property: Callable[[str, object], None]) -> None:
    for number, value in enumerate((threading.Lock(), lambda: None, sys.stdout, float("nan"), b"bytes")):
        record_property(f"odd {number}", value)
    record_property("plain", rank)


@two
def test_disk_quota(rank: int, process_group: Any) -> None:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, 2**10))
        Path("large").write_bytes(bytes(2**20))
    meet()


@two
def test_silent_disk_quota(rank: int) -> None:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@two
def test_disk_quota_and_fail(rank: int, process_group: Any) -> None:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        raise ValueError("the cause")
    meet()


@two
def test_well_after_all(rank: int, process_group: Any) -> None:
    meet()
