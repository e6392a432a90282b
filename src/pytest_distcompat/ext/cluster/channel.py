"""The channel between pytest's process and a node agent: messages in JSON over TCP.

An *agent* is the process that runs one machine's part of a test over several machines (``agent``).
pytest's process listens (``Listener``, made by ``membership``); agents connect. Anybody in the
network could connect too, so both sides first prove that they know the session's *token*, a secret,
without sending it. ``Channel`` does that when it is made:

1. pytest -> agent: a random number, the nonce;
2. agent -> pytest: another nonce, and an HMAC (a hash that only who knows the key can make) of
   "agent" and both nonces, with the token as its key;
3. pytest -> agent: an HMAC of "pytest" and both nonces.

From the nonces and the token both derive a key of this connection. Then messages follow in both
directions, such as ``{"do": "run", ...}``: the length of the body (4 bytes), an HMAC (32 bytes)
with that key of the direction, the number of the message and the body, and the body. So a message
cannot be forged, repeated, left out or sent back. Messages are not encrypted, and nothing is
unpickled.
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

#: How long a peer may take to prove that it knows the token, in seconds.
HANDSHAKE_TIMEOUT_S = 5.0
#: How many peers may be proving themselves at once; others wait in the listener's queue.
HANDSHAKES = 16
#: A peer is lost if its machine has answered nothing for so long, in seconds. The kernel answers,
#: so that a process may be busy or stopped.
SILENCE_S = 6
#: TCP keepalive: after a second in which nothing comes the kernel sends a probe each second, and
#: gives up after so many. https://man7.org/linux/man-pages/man7/tcp.7.html
_KEEPALIVE_OPTIONS = {
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: SILENCE_S,
    socket.TCP_USER_TIMEOUT: 1000 * SILENCE_S,
}
#: The errors with which the kernel ends the connection to a machine that does not answer.
_UNREACHED = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
#: The longest message, in bytes.
LONGEST = 256 * 2**20

#: The sizes of a nonce and of an HMAC, in bytes.
_NONCE_BYTES = 32
_MAC_BYTES = 32


class NotProvedError(Exception):
    """The peer does not know the token, or speaks another protocol."""


class Channel:
    """One authenticated connection.

    Args:
        connection: The socket, connected.
        token: What the peer must know too.
        serves: Whether this side is pytest's process; the other one is an agent.

    Raises:
        NotProvedError: If the peer does not know the token.
        OSError: If the peer goes away, or is too slow.
    """

    def __init__(self, connection: socket.socket, token: bytes, *, serves: bool) -> None:
        self._connection = connection
        #: The address of the other side; a run reads it of a node that may be gone by then.
        self.peer = str(connection.getpeername()[0])
        #: When the handshake must be over; None after it.
        self._deadline: float | None = clock.now() + HANDSHAKE_TIMEOUT_S
        # The directions of messages, which are part of each HMAC: ``p`` from pytest, ``a`` from the
        # agent. So nobody can send a message back to the side that sent it.
        if serves:
            nonces = self._serve_handshake(token)
            self._ours = b"p"
            self._theirs = b"a"
        else:
            nonces = self._answer_handshake(token)
            self._ours = b"a"
            self._theirs = b"p"
        # From now on a side may be silent for as long as its machine answers.
        self._deadline = None
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE_OPTIONS.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._key = _mac(token, b"key" + nonces)
        #: How many messages were sent, and received.
        self._sent = 0
        self._received = 0
        #: So that messages of several threads do not mix.
        self._lock = threading.Lock()

    def _serve_handshake(self, token: bytes) -> bytes:
        """Exchange proofs as pytest's process; return both nonces."""
        own_nonce = os.urandom(_NONCE_BYTES)
        self._connection.sendall(own_nonce)
        nonces = own_nonce + self._read(_NONCE_BYTES)
        self._check(self._read(_MAC_BYTES), token, b"agent" + nonces)
        self._connection.sendall(_mac(token, b"pytest" + nonces))
        return nonces

    def _answer_handshake(self, token: bytes) -> bytes:
        """Exchange proofs as an agent; return both nonces."""
        own_nonce = os.urandom(_NONCE_BYTES)
        nonces = self._read(_NONCE_BYTES) + own_nonce
        self._connection.sendall(own_nonce + _mac(token, b"agent" + nonces))
        self._check(self._read(_MAC_BYTES), token, b"pytest" + nonces)
        return nonces

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
            size = len(body).to_bytes(4, "big")
            self._connection.sendall(size + mac + body)

    def receive(self) -> dict[str, Any]:
        """Wait for the next message.

        Raises:
            OSError: The peer is gone.
            NotProvedError: The message is forged.
        """
        size = int.from_bytes(self._read(4), "big")
        if size > LONGEST:
            raise NotProvedError(f"a message of {size} bytes")
        mac = self._read(_MAC_BYTES)
        body = self._read(size)
        self._received += 1
        expected_mac = self._message_mac(self._theirs, self._received, body)
        if not hmac.compare_digest(mac, expected_mac):
            raise NotProvedError("a message that the peer did not sign")
        message: dict[str, Any] = json.loads(body)
        return message

    def close(self) -> None:
        """End the connection; a thread that receives gets an OSError."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _message_mac(self, direction: bytes, count: int, body: bytes) -> bytes:
        """Return the HMAC of a message: the ``count``-th of its direction."""
        return _mac(self._key, direction + count.to_bytes(8, "big") + body)

    def _read(self, size: int) -> bytes:
        """Read exactly so many bytes; in the handshake only until its deadline."""
        data = bytearray()
        while len(data) < size:
            if self._deadline is not None:
                self._connection.settimeout(max(0.001, self._deadline - clock.now()))
            missing = size - len(data)
            received = self._connection.recv(min(missing, 2**20))
            if not received:
                # ``recv`` returns nothing once the peer has closed the connection.
                raise ConnectionError("the connection was closed")
            data += received
        return bytes(data)

    @staticmethod
    def _check(mac: bytes, token: bytes, text: bytes) -> None:
        """Raise NotProvedError unless that is the HMAC of the text with the token."""
        if not hmac.compare_digest(mac, _mac(token, text)):
            raise NotProvedError("the other side has another token")


def unreached(error: BaseException) -> bool:
    """Tell whether an error says that nothing reaches the peer.

    The link is cut then, or the node is down.
    """
    return isinstance(error, OSError) and error.errno in _UNREACHED


def _mac(key: bytes, text: bytes) -> bytes:
    """Return the HMAC-SHA256 of the text, 32 bytes."""
    return hmac.new(key, text, hashlib.sha256).digest()


class Listener:
    """Listens on one interface for peers.

    Args:
        host: The address of the interface.
        port: The port; 0 for a free one, which ``port`` then is.
        token: What a peer must know.
        admit: Called with the channel of each peer that has proved itself, in a thread for each.
    """

    def __init__(
        self, host: str, port: int, token: bytes, admit: Callable[[Channel], None]
    ) -> None:
        self._token = token
        self._admit = admit
        self._socket = loopback.listen(host, port)
        #: How many more peers may be proving themselves.
        self._free = threading.BoundedSemaphore(HANDSHAKES)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="distcompat: accepts nodes", daemon=True).start()

    def _accept(self) -> None:
        """Accept connections until the listener is closed, in a thread of its own."""
        while True:
            self._free.acquire()
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # The listener is closed.
                return
            threading.Thread(target=self._prove, args=(connection,), daemon=True).start()

    def _prove(self, connection: socket.socket) -> None:
        """Do the handshake, and admit the peer if it knows the token."""
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
