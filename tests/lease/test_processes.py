"""Leases among real processes, killed ones included. Ordered by events, never by time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_distcompat.lease import read_timeline

if TYPE_CHECKING:
    from tests.lease.conftest import Field

IDS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


def test_eight_processes_that_fight_never_have_the_same_device(arena: Field, tmp_path: Path) -> None:
    ground = tmp_path / "ground"
    ground.mkdir()
    names = [f"fighter {number}" for number in range(8)]
    fighters = arena.enter(*names)
    for number, fighter in enumerate(fighters):
        fighter.send(f"fight 12 {number} {ground}")
    for fighter in fighters:
        assert fighter.receive() == ["fought"]
    spans = read_timeline(arena.timeline)
    assert len(spans) == 8 * 12
    pids = {span.pid for span in spans}
    assert pids == {fighter.process.pid for fighter in fighters}
    assert not arena.pool.holders()
    assert not arena.pool._queue.waiting()


def test_devices_of_a_killed_holder_are_free(arena: Field) -> None:
    holder, waiter = arena.enter("holder", "waiter")
    holder.send("lease 4")
    assert holder.receive() == ["got", *IDS]
    waiter.send("lease 3")
    arena.await_waiting("waiter")
    holder.kill()
    assert waiter.receive() == ["got", *IDS[:3]]


def test_a_killed_waiter_does_not_block_those_behind_it(arena: Field) -> None:
    holder, first, second, third = arena.enter("holder", "first", "second", "third")
    holder.send("lease 4")
    holder.receive()
    first.send("lease 1")
    arena.await_waiting("first")
    second.send("lease 2")
    arena.await_waiting("first", "second")
    third.send("lease 3")
    arena.await_waiting("first", "second", "third")
    first.kill()
    second.kill()
    arena.await_waiting("third")
    holder.send("release")
    # The holder gives back one after the other, so it may be any three.
    got, *ids = third.receive()
    assert got == "got"
    assert len(ids) == 3
    assert set(ids) <= set(IDS)


def test_a_large_request_is_served_before_all_small_ones_that_come_after_it(arena: Field) -> None:
    large, *small = arena.enter("large", "small 0", "small 1", "small 2", "small 3")
    for each in small:
        each.send("lease 1")
        each.receive()
    large.send("lease 4")
    arena.await_waiting("large")
    # A stream of small ones: each gives back what it has and asks again at once. What is free meanwhile is the large one's.
    for each in small[:3]:
        each.send("release\nlease 1")
        assert each.receive() == ["released"]
    small[3].send("release")
    assert large.receive() == ["got", *IDS]
    large.send("release")
    served = set()
    for each in small[:3]:
        got, name = each.receive()
        assert got == "got"
        served.add(name)
    assert served <= set(IDS)
    assert len(served) == 3
    spans = read_timeline(arena.timeline)
    first = next(span for span in spans if span.who == "large")
    for span in spans:
        if span.asked > first.asked:
            assert span.got >= first.got


def test_a_request_does_not_wait_for_earlier_ones_for_other_devices(arena: Field) -> None:
    (holder,) = arena.enter("holder")
    (greedy,) = arena.enter("greedy", ids=IDS[:3])
    (other,) = arena.enter("other", ids=IDS[3:])
    holder.send("lease 1")
    assert holder.receive() == ["got", "GPU-a"]
    greedy.send("lease 3")
    arena.await_waiting("greedy")
    other.send("lease 1")
    assert other.receive() == ["got", "GPU-d"]


def test_a_killed_process_leaves_no_ticket_and_no_holder(arena: Field) -> None:
    holder, waiter = arena.enter("holder", "waiter")
    holder.send("lease 4")
    holder.receive()
    for name, record in zip(IDS, arena.pool.holders(), strict=True):
        assert record.id == name
        assert record.who == "holder"
        assert record.pid == holder.process.pid
    waiter.send("lease 1")
    arena.await_waiting("waiter")
    waiter.kill()
    holder.kill()
    assert not arena.pool.holders()
    assert not arena.pool._queue.waiting()
    assert not list((arena.directory / "queue").iterdir())
