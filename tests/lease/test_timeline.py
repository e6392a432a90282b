"""The record of leases: written by many, read and drawn by one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_distcompat.lease import Inventory, Leak, Pool, Span, gaps, read_timeline

from .conftest import lease_elsewhere

if TYPE_CHECKING:
    from tests.lease.conftest import Field, MadeUpMemory


def span(who: str, begin: float, end: float, *ids: str) -> Span:
    return Span(ids, who, 1, begin, begin, end)


def test_each_lease_leaves_a_line(arena: Field) -> None:
    assert read_timeline(arena.timeline) == []
    with arena.pool.lease(1, who="outer"), lease_elsewhere(arena.pool, 2, "inner") as inner:
        pass
    outer_line, inner_line = read_timeline(arena.timeline)
    assert (outer_line.who, inner_line.who) == ("outer", "inner")
    assert inner_line.ids == inner.ids
    for line in (outer_line, inner_line):
        assert line.asked <= line.got <= line.released
    assert outer_line.got <= inner_line.asked
    assert inner_line.released <= outer_line.released


def test_a_leak_is_in_the_timeline(tmp_path: Path, memory: MadeUpMemory) -> None:
    pool = Pool(tmp_path / "leases", Inventory("gpu", ("GPU-a",)), memory=memory, free_timeout=0, timeline=tmp_path)
    with pool.lease(1, who="leaky"):
        memory.now["GPU-a"] += 1 << 30
    assert [line.leak for line in read_timeline(tmp_path)] == [(Leak("GPU-a", 1 << 30, "leaky"),)]


def test_the_gaps_of_a_device_say_what_they_were() -> None:
    waited = Span(("a", "b"), "large", 1, 6, 9, 10, waited_for=("another session",))
    spans = [span("one", 2, 4, "a"), span("two", 3, 9, "b"), waited]
    assert [(gap["device"], gap["begin"], gap["end"], gap["why"]) for gap in gaps(spans, 0.0, 12.0)] == [
        ("a", 0.0, 2, "collection, and start of the fork servers"),
        ("a", 4, 6, "no run to start: checks read what ran"),
        ("a", 6, 9, "a run waits for another session"),
        ("a", 10, 12.0, "nothing left to run"),
        ("b", 0.0, 2, "collection, and start of the fork servers"),
        ("b", 2, 3, "no run to start: checks read what ran"),
        ("b", 10, 12.0, "nothing left to run"),
    ]
    assert gaps([], 0.0, 12.0) == []


def test_an_unfinished_line_is_dropped(arena: Field) -> None:
    with arena.pool.lease(1, who="whole"):
        pass
    with (arena.timeline / "leases.jsonl").open("a") as file:
        file.write('{"ids": ["GPU-a"], "who": "ha')
    assert [line.who for line in read_timeline(arena.timeline)] == ["whole"]


def test_a_timeline_that_cannot_be_written_fails_no_test(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    pool = Pool(tmp_path / "leases", Inventory("cpu", ("cpu-0",)), timeline=tmp_path / "file")
    with pool.lease(1, who="one"):
        pass
