"""Which exceptions only say that another rank is gone: those of torch.distributed, and never somebody's own, whatever it says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta

import pytest

from pytest_distcompat.launch.peers import aborted_by_lost_peer, lost_peer

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5"


def caught(function: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as info:  # noqa: PT011 - whatever it is
        function()
    return info.value


def of_torch(message: str = GLOO, kind: type[Exception] = RuntimeError) -> None:
    """Raise as torch.distributed's own Python code does."""
    code = compile("raise kind(message)", "distributed_c10d.py", "exec")
    exec(code, {"__name__": "torch.distributed.distributed_c10d", "kind": kind, "message": message})


def wrapped(original: Callable[[], None]) -> None:
    try:
        original()
    except RuntimeError as error:
        raise ValueError("the trainer gave up") from error


def in_handler(original: Callable[[], None]) -> None:
    try:
        original()
    except RuntimeError:
        raise ValueError("the trainer gave up")  # noqa: B904 - as trainers do


def hidden(original: Callable[[], None]) -> None:
    try:
        original()
    except RuntimeError:
        raise ValueError("the trainer gave up") from None


@pytest.mark.parametrize("words", [GLOO, "Socket Timeout", "[1] recvValue failed: Broken pipe"])
def test_a_collectives_own_frame(words: str) -> None:
    assert lost_peer(caught(lambda: of_torch(words)))


@pytest.mark.parametrize("wrap", [wrapped, in_handler])
def test_exceptions_that_follow_a_lost_peer(wrap: Callable[[Callable[[], None]], None]) -> None:
    assert lost_peer(caught(lambda: wrap(of_torch)))


def test_after_a_lost_peer_was_dealt_with() -> None:
    def own() -> None:
        with contextlib.suppress(RuntimeError):
            of_torch()
        raise ValueError("of its own")

    assert not lost_peer(caught(own))
    assert not lost_peer(caught(lambda: hidden(of_torch)))


def test_another_exception_of_a_collective() -> None:
    assert not lost_peer(caught(lambda: of_torch("Tensors must be contiguous")))
    assert not lost_peer(caught(lambda: of_torch("Broken pipe", ValueError)))


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, ValueError, ConnectionError, BrokenPipeError])
@pytest.mark.parametrize("words", [GLOO, "Connection refused", "Broken pipe", "DistNetworkError"])
def test_an_exception_that_is_no_lost_peer(kind: type[Exception], words: str) -> None:
    def own() -> None:
        raise kind(words)

    assert not lost_peer(caught(own))


def test_an_exception_within_torch_that_is_no_lost_peer() -> None:
    """As a hook of the user's that a collective calls."""

    def hook() -> None:
        raise RuntimeError("Broken pipe")

    code = compile("hook()", "distributed_c10d.py", "exec")
    within = {"__name__": "torch.distributed.distributed_c10d", "hook": hook}
    assert not lost_peer(caught(lambda: exec(code, within)))


def test_torchs_own_types() -> None:
    distributed = pytest.importorskip("torch.distributed")

    def own() -> None:
        raise distributed.DistNetworkError("Connection refused")

    assert not lost_peer(caught(own))
    # No store listens on port 1. The exception comes out of C++, right into this frame.
    error = caught(lambda: distributed.TCPStore("127.0.0.1", 1, 2, is_master=False, timeout=timedelta(seconds=0.1)))
    assert type(error) is distributed.DistNetworkError
    assert lost_peer(error)


def test_an_abort_of_gloos_thread() -> None:
    output = f"terminate called after throwing an instance of 'gloo::IoException'\n  what():  {GLOO}\n"
    assert aborted_by_lost_peer(f"training\n{output}")
    assert not aborted_by_lost_peer("expected: Broken pipe\nAborted")
    assert not aborted_by_lost_peer("Broken pipe\nterminate called after throwing an instance of 'std::bad_alloc'")
