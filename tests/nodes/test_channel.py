"""The port on which nodes join: who lacks the token gets nothing done, whatever it sends."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_distcompat.ext.cluster import agent as agent_module
from pytest_distcompat.ext.cluster import channel as channel_module
from pytest_distcompat.ext.cluster.channel import Channel, Listener, NotProvedError

TOKEN = b"a token of the session"


@pytest.fixture
def admitted() -> queue.Queue[Channel]:
    return queue.Queue()


@pytest.fixture
def port(admitted: queue.Queue[Channel], monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(channel_module, "HANDSHAKE_TIMEOUT_S", 0.5)
    listener = Listener("127.0.0.1", 0, TOKEN, admitted.put)
    yield listener.port
    listener.close()


def connect(port: int, token: bytes = TOKEN) -> Channel:
    return Channel(socket.create_connection(("127.0.0.1", port), timeout=5), token, serves=False)


def test_both_sides_talk_once_they_have_proved_themselves(port: int, admitted: queue.Queue[Channel]) -> None:
    agent = connect(port)
    pytest_side = admitted.get(timeout=5)
    agent.send({"is": "facts", "text": "ä" * 100_000})
    assert pytest_side.receive() == {"is": "facts", "text": "ä" * 100_000}
    pytest_side.send({"do": "close"})
    assert agent.receive() == {"do": "close"}


def test_the_address_of_a_lost_peer_is_known(port: int, admitted: queue.Queue[Channel]) -> None:
    """A run may have waited for its devices, and read it of a node that was lost since."""
    agent, pytest_side = connect(port), admitted.get(timeout=5)
    pytest_side.close()
    assert pytest_side.peer == "127.0.0.1"
    agent.close()


def test_another_token_is_refused_by_both_sides(port: int, admitted: queue.Queue[Channel]) -> None:
    with pytest.raises((NotProvedError, ConnectionError)):
        connect(port, b"another token")
    assert admitted.empty()


def test_an_agent_does_nothing_for_a_session_that_lacks_the_token() -> None:
    listener = Listener("127.0.0.1", 0, b"of somebody else", lambda _: None)
    with pytest.raises((NotProvedError, ConnectionError)):
        connect(listener.port)
    listener.close()


def test_no_peer_can_answer_with_what_it_was_sent(port: int, admitted: queue.Queue[Channel]) -> None:
    """A peer that mirrors the session's own challenge and proofs back proves nothing."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
        nonce = peer.recv(32)
        peer.sendall(nonce + nonce)
        assert peer.recv(1) == b""
    assert admitted.empty()


def test_a_message_that_was_changed_or_sent_again_is_refused(port: int, admitted: queue.Queue[Channel]) -> None:
    for forge in ("changed", "again"):
        agent = connect(port)
        pytest_side = admitted.get(timeout=5)
        raw = bytearray(b"{}")
        mac = agent._message_mac(agent._ours, 1, bytes(raw))
        sent = len(raw).to_bytes(4, "big") + mac + raw
        if forge == "changed":
            sent = sent[:-1] + b"]"
        agent._connection.sendall(sent * 2)
        if forge == "again":
            assert pytest_side.receive() == {}
        with pytest.raises(NotProvedError, match="did not sign"):
            pytest_side.receive()


class Meddling:
    """A peer's socket that alters the byte at one place of all that is sent: ``change``, ``drop``, ``add``, or ``end`` there."""

    def __init__(self, connection: socket.socket, place: int, how: str, bit: int) -> None:
        self._connection = connection
        self._place = place
        self._how = how
        self._bit = bit
        self._sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def send(self, data: bytes | memoryview) -> int:
        raw = bytearray(data)
        at = self._place - self._sent
        self._sent += len(raw)
        if 0 <= at < len(raw):
            if self._how == "change":
                raw[at] ^= 1 << self._bit
            elif self._how == "drop":
                del raw[at]
            elif self._how == "add":
                raw.insert(at, raw[at] ^ 1 << self._bit)
            else:
                del raw[at:]
        self._connection.sendall(raw)
        is_complete = self._sent == HANDSHAKE + MESSAGE
        is_cut = self._how in {"drop", "end"} and at >= 0
        if is_complete or is_cut:
            # The session need not wait for more.
            self._connection.shutdown(socket.SHUT_WR)
        return len(data)

    sendall = send


#: The nonce and the proof; the length, the signature and the text of one message.
HANDSHAKE = 32 + 32
MESSAGE = 4 + 32 + len(b'{"do": "run"}')


# One port for all examples, as a session has.
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, HANDSHAKE + MESSAGE - 1), st.sampled_from(["change", "drop", "add", "end"]), st.integers(0, 7))
def test_nothing_that_was_altered_on_its_way_is_heard(
    port: int, admitted: queue.Queue[Channel], place: int, how: str, bit: int
) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        meddling = Meddling(connection, place, how, bit)
        with contextlib.suppress(NotProvedError, OSError):
            agent = Channel(cast("socket.socket", meddling), TOKEN, serves=False)
            agent.send({"do": "run"})
        if place < HANDSHAKE:
            # The session has hung up.
            with contextlib.suppress(OSError):
                assert not connection.recv(1)
            assert admitted.empty()
        else:
            with pytest.raises((NotProvedError, OSError)):
                admitted.get(timeout=5).receive()


def test_noise_on_the_port_admits_nobody_and_keeps_nobody_out(port: int, admitted: queue.Queue[Channel]) -> None:
    noise = random.Random(25)
    for _ in range(150):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
            kind = noise.choice(["bytes", "pickle", "http", "long", "nothing"])
            data = {
                "bytes": noise.randbytes(noise.randrange(1, 200)),
                "pickle": b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR.",
                "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                "long": noise.randbytes(1 << 16),
                "nothing": b"",
            }[kind]
            try:
                peer.sendall(data)
            except OSError:
                continue
    slow = []
    for _ in range(channel_module.HANDSHAKES + 4):
        slow.append(socket.create_connection(("127.0.0.1", port), timeout=5))
    agent = agent_module._connect("127.0.0.1", port, TOKEN, 10)
    agent.send({"is": "there"})
    heard: list[dict[str, object]] = []
    # An agent whose handshake took too long has tried again.
    while not heard:
        with contextlib.suppress(OSError):
            heard.append(admitted.get(timeout=5).receive())
    assert heard == [{"is": "there"}]
    assert admitted.empty()
    for peer in slow:
        peer.close()
