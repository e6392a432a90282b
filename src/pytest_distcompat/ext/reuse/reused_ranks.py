"""Reused ranks as pytest's process sees them: one run whose ranks do request after request.

``keeper`` makes a ``ReusedRanks`` for each open run of the launcher (``launcher.OpenRun``), and
calls ``send`` for each test. The ranks connect to a socket, get the request as a line of JSON, and
reply ``{"rank": 1, "changed": []}`` when they have done it. A reply that names a change is a reason
to end the ranks: ``end_reason`` is then ``on rank 1 it left the environment (FOO set to 'x')
changed``. ``request_loop`` is the part that runs on the ranks.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat.launch.files import Files, log_sizes
from pytest_distcompat.launch.launcher import OpenRun, Replies
from pytest_distcompat.launch.request import Request
from pytest_distcompat.wording import listed_ranks

#: The function that reused ranks call first.
SERVE = "pytest_distcompat.ext.reuse.request_loop:serve"


@dataclass(frozen=True)
class Reuse:
    """Which requests may share ranks, and for how long.

    The ranks end after the last request, after ``uses`` requests, after any failure, and when a
    request left a change that the next one could see.

    Attributes:
        scope: Requests of the same scope share ranks: ``module tests/test_a.py 2``. They must all
            have the same world size.
        uses: How many requests the ranks may do.
        last: Whether no further request of this scope follows.
    """

    scope: str
    uses: int
    last: bool = False


class ReusedRanks(Replies):
    """The ranks of an open run, which do one request after the other and reply to each.

    ``OpenRun.wait`` calls ``receive`` until all replies are ``complete``.

    Args:
        run: The open run: ranks that stay after a request. ``start_request`` is the request that
            started them, ``listener`` the socket to which they connect.
        reuse: Which requests these ranks do.
        first: The first request, which is not sent yet.
    """

    def __init__(self, run: OpenRun, reuse: Reuse, first: Request) -> None:
        self.run = run
        self.reuse = reuse
        #: How many requests were sent.
        self.uses = 0
        #: The request that the ranks do now, or did last, and the files that they write meanwhile.
        self.current_request = first
        self.files = Files(Path(first.directory))
        #: Whether a rank has died, or at least closed its socket.
        self.lost = False
        #: By the socket of each rank that has connected: what has arrived and is no whole line yet.
        self._buffers: dict[socket.socket, bytes] = {}
        #: By rank: what the current request left changed there.
        self.replies: dict[int, list[str]] = {}

    def send(self, request: Request) -> None:
        """Send a request to all ranks; those that are still starting get it once they connect."""
        # The ranks' output goes to the files of the run that they were started with. What is in
        # them now (``log_sizes``) belongs to earlier requests.
        directory = Path(self.run.start_request.directory)
        self.files = Files(directory, log_sizes(directory, request.world_size))
        self.uses += 1
        self.current_request = request
        self.replies = {}
        # The ranks write there. They do not need the request's file, which is for running the
        # request again by hand.
        Path(request.directory).mkdir(parents=True, exist_ok=True)
        for rank_socket in self._buffers:
            self._send_current(rank_socket)
        request.write()

    def _send_current(self, rank_socket: socket.socket) -> None:
        """Send the current request to the rank that has this socket."""
        # If the rank died, the agent reports how.
        with contextlib.suppress(OSError):
            rank_socket.sendall(f"{self.current_request.line}\n".encode())

    @property
    def homeless(self) -> bool:
        """Tell whether the directory to which the ranks write is gone.

        A cleaner of temporary files, or a test, may have removed it. ``keeper`` then ends the
        ranks.
        """
        return not Path(self.run.start_request.directory).is_dir()

    @property
    def sockets(self) -> list[socket.socket]:
        """The sockets on which ranks may connect or reply."""
        return [self.run.listener, *self._buffers]

    def receive(self) -> list[socket.socket]:
        """Read what has arrived, and return the sockets on which more may arrive."""
        ready, _, _ = select.select(self.sockets, [], [], 0)
        for ready_socket in ready:
            if ready_socket is self.run.listener:
                # A rank has started. It gets the request that the others have already.
                rank_socket, _ = self.run.listener.accept()
                self._buffers[rank_socket] = b""
                self._send_current(rank_socket)
            else:
                self._read(ready_socket)
        return self.sockets

    @property
    def complete(self) -> bool:
        """Tell whether all ranks have done the current request."""
        return len(self.replies) == self.run.start_request.world_size

    def _read(self, rank_socket: socket.socket) -> None:
        """Read what a rank has sent: a line of JSON, once it has done the current request."""
        try:
            received = rank_socket.recv(65536)
        except ConnectionError:
            received = b""
        if not received:
            # The rank has closed its end.
            self.lost = True
            self._buffers.pop(rank_socket)
            rank_socket.close()
            return
        self._buffers[rank_socket] += received
        if b"\n" in self._buffers[rank_socket]:
            line, _, rest = self._buffers[rank_socket].partition(b"\n")
            self._buffers[rank_socket] = rest
            reply = json.loads(line)
            self.replies[reply["rank"]] = reply["changed"]

    @property
    def end_reason(self) -> str:
        """The reason why these ranks must not do another request; empty if they may."""
        # Changes on a single rank are reason enough: those of the lowest rank that has any.
        for _, changed in sorted(self.replies.items()):
            if changed:
                names = ", ".join(changed)
                return f"on {self._ranks_with(changed)} it left {names} changed"
        if self.uses >= self.reuse.uses:
            return f"they did {self.uses} requests"
        return ""

    def _ranks_with(self, changed: list[str]) -> str:
        """Return the ranks that reported these changes, as text.

        An unsound process group is reported by several ranks, and none of them is more to blame
        than the others.
        """
        ranks = []
        for rank, reply in sorted(self.replies.items()):
            if reply == changed:
                ranks.append(rank)
        if self.complete and 1 < len(ranks) == len(self.replies):
            return "all ranks"
        return listed_ranks(ranks)

    def dismiss(self) -> None:
        """End the ranks' request loops by closing their sockets."""
        self.run.listener.close()
        for rank_socket in self._buffers:
            rank_socket.close()
        self._buffers.clear()
