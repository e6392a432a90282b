"""Temporary directories that are removed even if their owner is killed.

The next process that makes one removes them. Sockets are made below them, so they have short names.

An owner keeps a file in its directory locked (flock). The operating system releases the lock when
the owner dies, in whatever way, and no other process can have it by mistake: process numbers are
used again, locks are not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "distcompat-"
_LOCK = "owner.lock"
#: How many bytes the path of a socket may have, with a zero at its end: 108 on Linux, 104 elsewhere
#: (unix(7)).
_SOCKET_PATH_LIMIT = 104
#: The longest path below the directory for temporary files: multiprocessing's for its fork server,
#: in one of ours.
_LONGEST_PATH_BELOW = "distcompat-xxxxxxxx/pymp-xxxxxxxx/listener-xxxxxxxx"
_SHORT_ROOT = "/tmp"  # noqa: S108 - tempfile, which makes names that cannot be guessed, is used below it


def temporary_root() -> Path:
    """Return the directory for temporary files.

    It is ``/tmp`` if the usual one has so long a name that no socket can be made below it.
    Schedulers of clusters give each job such a directory.
    """
    default = Path(tempfile.gettempdir())
    if len(os.fsencode(default / _LONGEST_PATH_BELOW)) < _SOCKET_PATH_LIMIT:
        return default
    if os.access(_SHORT_ROOT, os.W_OK | os.X_OK):
        return Path(_SHORT_ROOT)
    return default


class OwnedDirectory:
    """A new directory for temporary files.

    It is this process's own until it calls ``remove``, drops the object, or ends.

    Args:
        name: Part of the directory's name. Such a directory is where the user looks for it, and its
            path may be too long for sockets.
    """

    def __init__(self, name: str = "") -> None:
        remove_abandoned()
        if name:
            prefix = f"{_PREFIX}{name}-"
            root = Path(tempfile.gettempdir())
        else:
            prefix = _PREFIX
            root = temporary_root()
        # It has another name until it is locked, because one without a lock counts as abandoned.
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=root))
        lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.rename(made.with_name(made.name[1:]))
        # Also called where a signal interrupts the constructor of what was to own this object.
        self.remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def leave(self) -> None:
        """Leave the directory to the user: nobody removes it."""
        finalizer = self.remove.detach()
        if finalizer is not None:
            _, _, (path, lock, _), _ = finalizer
            (path / _LOCK).unlink(missing_ok=True)
            os.close(lock)


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """Yield a new directory that is removed after the block.

    If this process is killed in the block, a later session removes it.
    """
    owned = OwnedDirectory()
    try:
        yield owned.path
    finally:
        owned.remove()


def _remove(path: Path, lock: int, owner: int) -> None:
    """Remove a directory. Do nothing in a fork of the owner, to which it does not belong."""
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_abandoned() -> None:
    """Remove this user's directories whose owners are gone.

    A directory without a lock may be another program's, and stays.
    """
    for root in {temporary_root(), Path(tempfile.gettempdir())}:
        for path in root.glob(f"{_PREFIX}*"):
            # Another process may be removing it.
            with contextlib.suppress(OSError):
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    """Remove a directory of this user's if nobody has its lock.

    Raises OSError if somebody has, or there is none.
    """
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if path.lstat().st_uid == os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
