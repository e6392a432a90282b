"""Temporary directories that are removed even if their owner is killed.

The directory of the launcher process is one (``launcher_process``), and so are the store of
``engine``, which runs a suite's checks without pytest, and the directories of scripts that run
(``ext/scripts``). An owner that is killed cannot remove its directory. So the next process that
makes such a directory removes all that have no owner any more.

An owner keeps a file in its directory locked (flock). The operating system releases the lock when
the owner dies, in whatever way, and no other process can have it by mistake: process numbers are
used again, locks are not.

The names are short, as ``distcompat-k3x9_2ab``, because sockets are made below them, whose paths
are limited to about a hundred bytes.
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
    """A new directory for temporary files: ``path``.

    It is this process's own until it calls ``remove``, drops the object, or ends.

    Args:
        name: Part of the directory's name, for one that the user may look into. It is below the
            usual directory for temporary files, and its path may be too long for sockets. Empty
            for a short path.
    """

    def __init__(self, name: str = "") -> None:
        remove_abandoned()
        if name:
            prefix = f"{_PREFIX}{name}-"
            root = Path(tempfile.gettempdir())
        else:
            prefix = _PREFIX
            root = temporary_root()
        # It has another name (with a dot) until it is locked. Otherwise another process could take
        # the lock first, and remove the directory as abandoned.
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=root))
        lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.rename(made.with_name(made.name[1:]))
        # A finalizer is also called where Ctrl-C interrupts the caller before it has stored this
        # object.
        self.remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def leave(self) -> None:
        """Leave the directory to the user: nobody removes it."""
        finalizer = self.remove.detach()
        if finalizer is not None:
            # It has the object, the function, and the arguments that were given to it above.
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
    """Remove a directory of this user's if no process has its lock.

    Raises:
        OSError: A process has the lock, or there is no lock file.
    """
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if path.lstat().st_uid == os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
