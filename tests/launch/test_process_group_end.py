"""End of a process group: what takes half a second with NCCL is left to the end of the process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pytest_distcompat.launch import process_group_end, rank

torch = pytest.importorskip("torch")
distributed = torch.distributed


@pytest.fixture
def group() -> Iterator[Any]:
    """A default process group of this process alone."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed.group.WORLD
    if distributed.is_initialized():
        distributed.destroy_process_group()


def end(monkeypatch: pytest.MonkeyPatch, *, backend: str, ends_at_once: bool) -> list[str]:
    """End the group as one of that backend; return what was called of CUDA."""
    calls: list[str] = []
    monkeypatch.setattr(distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(rank, "ends_at_once", ends_at_once)
    process_group_end.leave_process_group()
    return calls


def test_a_forked_rank_leaves_nccl_to_the_end_of_the_process(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert end(monkeypatch, backend="nccl", ends_at_once=True) == ["synchronize"]
    assert distributed.is_initialized()
    assert process_group_end.default_store().check(["distcompat/all-left"])


def test_a_rank_that_others_keep_waiting_destroys_the_group(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(process_group_end, "WAIT_S", 0.1)
    assert end(monkeypatch, backend="nccl", ends_at_once=True) == ["synchronize"]
    assert not distributed.is_initialized()


@pytest.mark.parametrize(("backend", "ends_at_once"), [("nccl", False), ("gloo", True)])
def test_other_groups_are_destroyed(
    backend: str, ends_at_once: bool, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert end(monkeypatch, backend=backend, ends_at_once=ends_at_once) == []
    assert not distributed.is_initialized()
