"""Temporary directories that go even if their owner is killed: whoever makes one first removes those of the dead.

Sockets are made below them, so they have short names.

An owner keeps a file in its directory locked (flock). The operating system lets the lock go when the owner dies, in whatever
way, and nobody else has it by mistake: process numbers come again, locks do not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "distcompat-"
_LOCK = "owner.lock"
#: So many bytes the path of a socket may have, with a zero at its end: 108 on Linux, 104 elsewhere (unix(7)).
_PATH = 104
#: The longest path that is put into the directory for temporary files: multiprocessing's for its fork server, in one of ours.
_BELOW = "distcompat-xxxxxxxx/pymp-xxxxxxxx/listener-xxxxxxxx"
_SHORT = "/tmp"  # noqa: S108 - tempfile, which makes names there that nobody can guess, is used below it


def place() -> Path:
    """The directory for temporary files; ``/tmp`` if no socket can be made below it, for its name is too long.

    Schedulers of clusters give each job one whose name is.
    """
    usual = Path(tempfile.gettempdir())
    if len(os.fsencode(usual / _BELOW)) < _PATH or not os.access(_SHORT, os.W_OK | os.X_OK):
        return usual
    return Path(_SHORT)


class OwnedDirectory:
    """A new directory where temporary files go, this process's own until it calls ``remove`` or dies."""

    def __init__(self) -> None:
        remove_those_of_the_dead()
        # By another name until it is locked: one that is not is a dead man's.
        made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place()))
        self._lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.rename(made.with_name(made.name[1:]))
        self._owner = os.getpid()

    def remove(self) -> None:
        """Remove it. In a fork of its owner, to which it does not belong, do nothing."""
        if os.getpid() == self._owner:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._owner = 0


def remove_those_of_the_dead() -> None:
    """Remove this user's directories whose owners are gone; one without a lock is not ours to judge."""
    for path in place().glob(f"{_PREFIX}*"):
        # Somebody else may be at it.
        with contextlib.suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if path.lstat().st_uid == os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
