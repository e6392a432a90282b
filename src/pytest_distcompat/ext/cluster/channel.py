"""The channel between pytest's process and a node agent: messages of JSON over TCP, between peers that know a token.

Both sides prove by HMAC that they know it before either reads a message, and each message carries an HMAC over a key of the
connection and a counter. Nothing is unpickled here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.launch import loopback

#: How long a peer may take to prove itself, in seconds.
HANDSHAKE_TIMEOUT_S = 5.0
#: How many peers may be proving themselves at once; others wait in the listener's queue.
HANDSHAKES = 16
#: A peer is lost whose kernel has answered nothing for so long, in seconds. That of a busy or a stopped process answers.
SILENCE_S = 6
#: By https://man7.org/linux/man-pages/man7/tcp.7.html: the kernel asks the peer's each second in which nothing comes.
_PROBED = {
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: SILENCE_S,
    socket.TCP_USER_TIMEOUT: 1000 * SILENCE_S,
}
#: What it says of a peer that does not answer.
_UNREACHED = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
#: The longest message, in bytes.
LONGEST = 256 * 2**20

_NONCE, _MAC = 32, 32


class NotProvedError(Exception):
    """The peer does not know the token, or speaks another protocol."""


class Channel:
    """One authenticated connection."""

    def __init__(self, connection: socket.socket, token: bytes, *, serves: bool) -> None:
        """Prove both sides to each other. Raises NotProvedError, or OSError if the peer goes away or is too slow."""
        self._connection = connection
        #: The address of the other side; a run reads it of a node that may be gone by then.
        self.peer = str(connection.getpeername()[0])
        self._deadline: float | None = clock.now() + HANDSHAKE_TIMEOUT_S
        own = os.urandom(_NONCE)
        if serves:
            connection.sendall(own)
            theirs = self._read(_NONCE)
            nonces = own + theirs
            self._check(self._read(_MAC), token, b"agent" + nonces)
            connection.sendall(_mac(token, b"pytest" + nonces))
        else:
            theirs = self._read(_NONCE)
            nonces = theirs + own
            connection.sendall(own + _mac(token, b"agent" + nonces))
            self._check(self._read(_MAC), token, b"pytest" + nonces)
        self._deadline = None
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PROBED.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._key = _mac(token, b"key" + nonces)
        self._ours, self._theirs = (b"p", b"a") if serves else (b"a", b"p")
        self._sent = self._received = 0
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """The own address of this side: the interface that leads to the peer."""
        return str(self._connection.getsockname()[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message, from any thread. Raises OSError if the peer is gone."""
        body = json.dumps(message).encode()
        with self._lock:
            self._sent += 1
            mac = self._message_mac(self._ours, self._sent, body)
            self._connection.sendall(len(body).to_bytes(4, "big") + mac + body)

    def receive(self) -> dict[str, Any]:
        """Wait for the next message. Raises OSError if the peer is gone, NotProvedError for a forged message."""
        size = int.from_bytes(self._read(4), "big")
        if size > LONGEST:
            raise NotProvedError(f"a message of {size} bytes")
        mac, body = self._read(_MAC), self._read(size)
        self._received += 1
        if not hmac.compare_digest(mac, self._message_mac(self._theirs, self._received, body)):
            raise NotProvedError("a message that the peer did not sign")
        message: dict[str, Any] = json.loads(body)
        return message

    def close(self) -> None:
        """End the connection; a thread that receives gets an OSError."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _message_mac(self, direction: bytes, count: int, body: bytes) -> bytes:
        return _mac(self._key, direction + count.to_bytes(8, "big") + body)

    def _read(self, size: int) -> bytes:
        """Read exactly so many bytes."""
        data = bytearray()
        while len(data) < size:
            if self._deadline is not None:
                self._connection.settimeout(max(0.001, self._deadline - clock.now()))
            received = self._connection.recv(min(size - len(data), 2**20))
            if not received:
                raise ConnectionError("the connection was closed")
            data += received
        return bytes(data)

    @staticmethod
    def _check(mac: bytes, token: bytes, text: bytes) -> None:
        if not hmac.compare_digest(mac, _mac(token, text)):
            raise NotProvedError("the other side has another token")


def unreached(error: BaseException) -> bool:
    """Tell whether an error says that nothing reaches the peer: the link is cut, or the node is down."""
    return isinstance(error, OSError) and error.errno in _UNREACHED


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.new(key, text, hashlib.sha256).digest()


class Listener:
    """Listens on one interface, and calls ``admit`` in a thread of its own with the channel of each proved peer."""

    def __init__(self, host: str, port: int, token: bytes, admit: Callable[[Channel], None]) -> None:
        self._token, self._admit = token, admit
        self._socket = loopback.listen(host, port)
        self._free = threading.BoundedSemaphore(HANDSHAKES)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="distcompat: accepts nodes", daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._free.acquire()
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._prove, args=(connection,), daemon=True).start()

    def _prove(self, connection: socket.socket) -> None:
        try:
            channel = Channel(connection, self._token, serves=True)
        except (OSError, NotProvedError):
            connection.close()
            return
        finally:
            self._free.release()
        self._admit(channel)

    def close(self) -> None:
        """Stop to listen."""
        with contextlib.suppress(OSError):
            # Wakes the thread that accepts.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
