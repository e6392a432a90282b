"""The port on which nodes join: who lacks the token gets nothing done, whatever it sends."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
from collections.abc import Iterator

import pytest

from pytest_distcompat.nodes import agent as agent_module
from pytest_distcompat.nodes import channel as channel_module
from pytest_distcompat.nodes.channel import Channel, Listener, NotProvedError

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
    slow = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(channel_module.HANDSHAKES + 4)]
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
