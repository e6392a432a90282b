"""Disks that take no more bytes: how to recognise one, and the error to report.

On a full disk a rank can write neither its log nor a report of its error, and the user must see the
full disk as the cause. ``launch.forensics`` asks for ``full_disk_reason`` when a rank has ended
without a last event in its log. ``lease``, which lends GPUs to runs, asks ``is_full`` when it
cannot write its records, and goes on without them.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

#: Numbers of errors: the disk is full, or this user may use no more of it (a quota).
_FULL = {errno.ENOSPC, errno.EDQUOT}
#: As much as a report of an error needs, in bytes: a traceback, and pytest's description of a
#: failure.
REPORT_BYTES = 64 * 1024


def is_full(error: OSError) -> bool:
    """Tell whether an error says that a disk is full."""
    return error.errno in _FULL


def full_disk_reason(directory: Path, size: int = REPORT_BYTES) -> str:
    """Return why no report can be written into a directory; empty if one can.

    Args:
        directory: An existing directory.
        size: How many bytes are to be written, to a file that has no name.

    Returns:
        ``[Errno 28] No space left on device: '/data'``. Empty if all bytes can be written, and for
        any other error.
    """
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            # Some file systems find out only when the bytes are to be stored.
            written = file.write(bytes(size))
            os.fsync(file.fileno())
    except OSError as error:
        if is_full(error):
            return _described(directory, error.errno)
        return ""
    if written is not None and written < size:
        # A disk that takes only a part of the bytes raises nothing.
        return _described(directory, errno.ENOSPC)
    return ""


def _described(directory: Path, number: int | None) -> str:
    """Return the text of the error with that number, as Python would show it."""
    number = number or errno.ENOSPC
    return f"[Errno {number}] {os.strerror(number)}: '{directory}'"
