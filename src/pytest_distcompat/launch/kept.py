"""The parent's end of ranks that live on: one run that does request after request."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat.launch.files import Files, sizes
from pytest_distcompat.launch.request import Request

SERVE = "pytest_distcompat.launch.serving:serve"


@dataclass(frozen=True)
class Keeping:
    """For whom ranks are kept after a request.

    Requests of one ``scope``, which are all of one world size, share them. They leave after the ``last`` one, after
    ``uses`` of them, after any failure, and when a request left something changed that the next one could see.
    """

    scope: str
    uses: int
    last: bool = False


class KeptRanks:
    """a run of ranks that wait for requests on a socket; ``environment`` is what they started with."""

    def __init__(self, first: Request, keep: Keeping, place: Path, environment: Mapping[str, str]) -> None:
        self.keep = keep
        self.environment = dict(environment)
        self.uses = 0
        self._place = place
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(place))
        self._listener.listen(first.world_size)
        self.request = Request(
            target=SERVE,
            payload={"socket": str(place)},
            world_size=first.world_size,
            directory=str(Path(first.directory) / "ranks"),
            timeout=first.timeout,
            set=first.set,
            unset=first.unset,
            argv=first.argv,
            collected=first.collected,
        )
        #: What they were asked to do last, and where they write meanwhile.
        self.asked = first
        self.files = Files.of(first.directory)
        #: A rank has died, or at least closed its socket.
        self.lost = False
        self._ranks: dict[socket.socket, bytes] = {}
        #: By rank: what the request left changed there.
        self.replies: dict[int, list[str]] = {}

    def ask(self, request: Request) -> None:
        """Have the ranks do that request; those that are still starting get it when they are there."""
        run = Path(self.request.directory)
        self.files = Files(run, sizes(run, request.world_size))
        self.uses += 1
        self.asked = request
        self.replies = {}
        # The ranks write there. They need not wait for the file, which is for whoever runs it again.
        Path(request.directory).mkdir(parents=True, exist_ok=True)
        for rank in self._ranks:
            self._send(rank)
        request.write()

    def _send(self, rank: socket.socket) -> None:
        # If it died, the agent tells how.
        with contextlib.suppress(OSError):
            rank.sendall(f"{self.asked.line}\n".encode())

    @property
    def sockets(self) -> list[socket.socket]:
        """What there may be something to read from."""
        return [self._listener, *self._ranks]

    def look(self) -> list[socket.socket]:
        """Read what there is; the sockets on which there may be more."""
        ready, _, _ = select.select(self.sockets, [], [], 0)
        for one in ready:
            if one is self._listener:
                rank, _ = one.accept()
                self._ranks[rank] = b""
                self._send(rank)
            else:
                self._read(one)
        return self.sockets

    @property
    def replied(self) -> bool:
        """Whether all ranks have done what they were asked for."""
        return len(self.replies) == self.request.world_size

    def _read(self, rank: socket.socket) -> None:
        try:
            received = rank.recv(65536)
        except ConnectionError:
            received = b""
        if not received:
            self.lost = True
            self._ranks.pop(rank)
            rank.close()
            return
        line, end, rest = (self._ranks[rank] + received).partition(b"\n")
        self._ranks[rank] = rest if end else line
        if end:
            reply = json.loads(line)
            self.replies[reply["rank"]] = reply["changed"]

    @property
    def to_leave(self) -> str:
        """Why these ranks are not to do another request; empty if they may."""
        for changed in (reply for _, reply in sorted(self.replies.items()) if reply):
            # A process group that is not sound is so on several: none of them is to blame more than another.
            ranks = [str(rank) for rank, reply in sorted(self.replies.items()) if reply == changed]
            several = "all ranks" if self.replied and len(ranks) == len(self.replies) else f"ranks {', '.join(ranks)}"
            where = several if len(ranks) > 1 else f"rank {ranks[0]}"
            return f"on {where} it left {', '.join(changed)} changed"
        return f"they did {self.uses} requests" if self.uses >= self.keep.uses else ""

    def leave(self) -> None:
        """Have the ranks leave."""
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()
        self._listener.close()
        self._place.unlink(missing_ok=True)
