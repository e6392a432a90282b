"""Directory of locks and records, which a cleaner may remove even while locks are held.

All pytest processes of one user on a machine agree on devices through one directory below the
temporary one. ``pool`` has a lock and a record in it for each device that is leased, ``tickets``
those of each request that waits. A *cleaner* is what empties temporary directories, as
systemd-tmpfiles does: it may remove a locked file, or the whole directory, at any time. So each
function here creates again what is missing, and a lock checks that its file is still in place.

A device's name is like ``GPU-8932f937-...`` or ``cpu-0.1``; that of a place, a part of a GPU that
runs share, like ``GPU-8932f937-....place-2-of-4``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shlex
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from pytest_distcompat.disk import is_full
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.places import device_of, place_of

#: The sockets of this network namespace (``man 5 proc_net``).
SOCKETS = Path("/proc/net/unix")
#: The subdirectory of the tickets (``tickets.Queue``).
QUEUE = "queue"


class TakenError(Exception):
    """Another process or thread has the lock or the claim that was asked for."""


@dataclass(frozen=True)
class FileLock:
    """Lock on a file of the directory, until ``close`` or the end of the process.

    It excludes threads of one process too: each lock opens the file anew.
    """

    path: Path
    #: The file descriptor. Its ``flock`` is the lock.
    file: int

    def in_place(self) -> bool:
        """Tell whether the path still names the locked file, rather than a newer one."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self.file), os.lstat(self.path))
        return False

    def close(self) -> None:
        """Unlock.

        A forked child only closes its copy: ``LOCK_UN`` would unlock its parent's file.
        """
        os.close(self.file)


class LeaseDirectory:
    """A directory of this user for locks and records. It is created again whenever it is missing.

    A lock on a removed file excludes nobody, because the next process creates the file again. So a
    lock on a device has two parts. The file is visible to all containers that share the directory.
    An abstract socket address (``claim``) cannot be removed, but it is visible in one network
    namespace only.
    """

    def __init__(self, path: Path) -> None:
        """Make the directory.

        Raises UsageProblem if it, or something in it, belongs to another user.
        """
        self.path = path
        self.make()
        self._address = os.path.realpath(path)

    def make(self) -> None:
        """Create the directory if it is missing; several processes may do so at the same time."""
        while True:
            # A cleaner may still be removing the directory.
            with contextlib.suppress(FileNotFoundError):
                own_directory(self.path)
                # pathlib's exist_ok would check the directory once more, and it may be gone by
                # then.
                with contextlib.suppress(FileExistsError):
                    (self.path / QUEUE).mkdir(mode=0o700)
                return

    def _in_directory(self, call: Callable[[], int]) -> int:
        """Return what a call returns; make the directory and call again while it is missing."""
        while True:
            with contextlib.suppress(FileNotFoundError):
                return call()
            self.make()

    def write(self, name: str, text: str) -> None:
        """Write a record, ``cpu-0.1.json``, for processes that wait.

        On a full disk none is written; the lock holds anyway.
        """
        try:
            self._in_directory(lambda: (self.path / name).write_text(text, encoding="utf-8"))
        except OSError as error:
            if not is_full(error):
                raise

    def tickets(self) -> Iterator[str]:
        """Yield the texts of the records in the queue; those removed meanwhile are left out."""
        with contextlib.suppress(FileNotFoundError):
            for path in (self.path / QUEUE).iterdir():
                if path.suffix == ".json":
                    with contextlib.suppress(FileNotFoundError):
                        yield path.read_text(encoding="utf-8")

    def lock(self, name: str, *, shared: bool = False) -> FileLock:
        """Lock a file without waiting.

        Several processes may have a shared lock at the same time. It excludes a lock that is not
        shared, and such a lock excludes all others.

        Args:
            name: The name of the file, which is created: ``cpu-0.1.lock``.
            shared: Whether the lock is shared.

        Raises:
            TakenError: If a lock of another process or thread excludes this one.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        path = self.path / name
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            file = self._in_directory(lambda: os.open(path, flags, 0o600))
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                raise TakenError(name) from None
            locked = FileLock(path, file)
            if locked.in_place():
                return locked
            # It was removed after it was opened.
            locked.close()

    def claim(self, name: str) -> socket.SocketType:
        """Bind the abstract socket address of a device, until the socket is closed.

        An abstract address is a name in the kernel without a file: see unix(7). Nobody connects to
        it. That one socket only can have it makes it a lock.

        Raises:
            TakenError: If another process or thread has bound it.
        """
        # ``SocketType`` is the class behind ``socket.socket``, which plugins replace to forbid
        # connections.
        claimed = socket.SocketType(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claimed.bind(self._claimed(name))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                claimed.close()
                raise TakenError(name) from None
            # A kernel without such addresses: the file is the lock.
        return claimed

    def claimed(self, device: str) -> list[str]:
        """Return the names of a device and its places that processes claim.

        ``["GPU-a.place-1-of-4"]``; empty if there are none, or if the kernel does not list them.
        """
        # The kernel lists an abstract address with ``@`` for its first byte, which is 0.
        prefix = self._claimed(device).replace("\0", "@")
        names = []
        with contextlib.suppress(OSError):
            for line in SOCKETS.read_text(encoding="utf-8", errors="replace").splitlines():
                address = line.rpartition(" ")[2]
                if address.startswith(prefix):
                    names.append(device + address.removeprefix(prefix))
        return names

    def claimant(self, name: str) -> int:
        """Return the number of the process that claims a device, 0 if it cannot be known."""
        address = self._claimed(name).replace("\0", "@")
        # Only those of this user's processes are seen.
        with contextlib.suppress(psutil.Error, OSError):
            for connection in psutil.net_connections("unix"):
                if str(connection.laddr) == address:
                    return connection.pid or 0
        return 0

    def _claimed(self, name: str) -> str:
        """Return the abstract address of a device or place.

        It is a digest of the directory and the device, with the place behind it, so that the
        addresses of all places of a device begin with that of the device.
        """
        # An address has 107 bytes at most; a path may have more.
        device = device_of(name)
        path = os.fsencode(f"{self._address}/{device}")
        digest = hashlib.sha256(path).hexdigest()
        place = place_of(name)
        return f"\0distcompat-{os.getuid()}-{digest[:32]}{place}"


def own_directory(path: Path) -> Path:
    """Make that directory for this user alone, and return its path.

    In a shared temporary directory another user could otherwise place a link at the path, or have
    the locks. A directory of this user that is open to others is closed to them first.

    Raises:
        UsageProblem: If the path, or something in the directory, belongs to another user.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    status = os.lstat(path)
    mode = stat.S_IMODE(status.st_mode)
    command = f"rm -r {shlex.quote(str(path))}"
    if not stat.S_ISDIR(status.st_mode):
        problem = "is not a directory"
    elif status.st_uid != os.getuid():
        problem = f"belongs to user {status.st_uid}, not {os.getuid()} (mode {mode:o})"
        command = f"sudo {command}"
    elif mode & 0o777 == 0o700:
        return path
    else:
        not_own = _close_to_others(path)
        if not_own is None:
            return path
        problem = (
            f"was open to others (mode {mode & 0o777:o}, expected 700), "
            f"and {not_own} in it is not yours alone"
        )
    raise UsageProblem(
        f"leases cannot be kept in {path}: it {problem}. To make a new one: {command}"
    )


def _close_to_others(path: Path) -> str | None:
    """Set the mode of a directory of this user to 700, and keep what is in it.

    Locks are on files and device names, so they hold through this, in whatever process. After it
    nobody else can add anything. Returns the name of something that another user has put there
    before, None if there is nothing such.
    """
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(directory, 0o700)
        for _, directories, files, place in os.fwalk(dir_fd=directory):
            for name in (*directories, *files):
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(name, dir_fd=place)
                    is_link = stat.S_ISLNK(status.st_mode)
                    own = status.st_uid == os.getuid() and not is_link
                    # A file with a second name elsewhere may have been linked by another user.
                    has_other_name = name in files and status.st_nlink > 1
                    if not own or has_other_name:
                        return name
    finally:
        os.close(directory)
    return None
