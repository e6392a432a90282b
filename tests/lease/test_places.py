"""Runs of one user that share a GPU: each has places of it, as many as it has ranks there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.lease import Inventory, LeaseTimeout, Pool, read_timeline
from pytest_distcompat.places import device_of, may_be_held_beside, places_in

from .conftest import IDS, lease_elsewhere

if TYPE_CHECKING:
    from tests.lease.conftest import Contender, Field

ONE = IDS[:1]
PLACES_OF_TWO = ("GPU-a.place-1-of-2", "GPU-a.place-2-of-2")
GOT = ["got", "GPU-a"]


def shared(arena: Field, ids: tuple[str, ...] = ONE, places: int = 2) -> Pool:
    """Return a pool like ``arena.pool`` whose runs share each GPU."""
    return Pool(arena.directory, Inventory("gpu", ids, places, runs_share=True), timeline=arena.timeline)


def lease(contender: Contender, ranks: int = 1) -> None:
    contender.send(f"lease {ranks}")


def release(contender: Contender) -> None:
    contender.send("release")
    assert contender.receive() == ["released"]


def test_two_runs_of_one_rank_use_a_gpu_of_two_places_and_three_do_not(arena: Field) -> None:
    first, second, third = arena.enter("first", "second", "third", ids=ONE, places=2)
    for holder in (first, second):
        lease(holder)
        assert holder.receive() == GOT
    assert [(holder.id, holder.who) for holder in arena.pool.holders()] == [
        (PLACES_OF_TWO[0], "first"),
        (PLACES_OF_TWO[1], "second"),
    ]
    lease(third)
    arena.await_waiting("third")
    release(second)
    assert third.receive() == GOT
    release(third)
    release(first)
    spans = {span.who: span for span in read_timeline(arena.timeline)}
    assert spans.keys() == {"first", "second", "third"}
    assert spans["first"].ids == PLACES_OF_TWO[:1]
    assert spans["second"].ids == PLACES_OF_TWO[1:]
    assert spans["third"].ids == PLACES_OF_TWO[1:]
    assert spans["first"].got < spans["second"].released
    assert spans["second"].released < spans["third"].got
    assert spans["third"].got < spans["first"].released


def test_a_run_has_a_place_for_each_rank_or_none(arena: Field) -> None:
    holder, large = arena.enter("holder", "large", ids=ONE, places=3)
    lease(holder, 2)
    assert holder.receive() == GOT
    lease(large, 2)
    arena.await_waiting("large")
    # The one that is free is nobody's while a second is missing.
    with pytest.raises(LeaseTimeout) as caught, lease_elsewhere(shared(arena, places=3), 2, "late"):
        pass
    assert [line.partition(" (")[0].strip() for line in str(caught.value).splitlines()] == [
        "late: no 1 of 1 GPUs to be had in time",
        "GPU-a.place-1-of-3 is held by holder",
        "GPU-a.place-2-of-3 is held by holder",
        "large",
    ]
    release(holder)
    assert large.receive() == GOT


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_spread_over_gpus_before_they_share(ranks: int, arena: Field) -> None:
    pool = shared(arena, IDS[:2])
    with pool.lease(ranks, who="run"):
        leased_places = [holder.id for holder in pool.holders()]
    gpus = {device_of(name) for name in leased_places}
    places_by_ranks = {1: 1, 2: 2, 3: 4, 4: 4}
    assert gpus == set(IDS[: min(ranks, 2)])
    assert len(leased_places) == places_by_ranks[ranks]


def test_a_run_takes_the_gpu_with_the_fewest_runs(arena: Field) -> None:
    pool = shared(arena, IDS[:2])
    with pool.lease(1, who="first") as first, lease_elsewhere(pool, 1, "second") as second:
        assert (first.ids, second.ids) == (("GPU-a",), ("GPU-b",))
        with lease_elsewhere(pool, 2, "third") as third:
            assert third.ids == IDS[:2]


@pytest.mark.parametrize("other", [1, 3], ids=["whole GPUs", "three places"])
def test_sessions_that_divide_a_gpu_otherwise_exclude_each_other_and_none_starves(other: int, arena: Field) -> None:
    first, second, late = arena.enter("one", "two", "late", ids=ONE, places=2)
    (stranger,) = arena.enter("stranger", ids=ONE, places=other)
    for holder in (first, second):
        lease(holder)
        assert holder.receive() == GOT
    lease(stranger)
    arena.await_waiting("stranger")
    # A place is free, but the stranger was first.
    release(first)
    lease(late)
    arena.await_waiting("stranger", "late")
    release(second)
    assert stranger.receive() == GOT
    arena.await_waiting("late")
    release(stranger)
    assert late.receive() == GOT


def test_a_place_of_a_killed_holder_is_free(arena: Field) -> None:
    killed, lives, waiter = arena.enter("killed", "lives", "waiter", ids=ONE, places=2)
    for holder in (killed, lives):
        lease(holder)
        assert holder.receive() == GOT
    lease(waiter)
    arena.await_waiting("waiter")
    killed.kill()
    assert waiter.receive() == GOT
    assert {holder.who for holder in arena.pool.holders()} == {"waiter", "lives"}
    waiter.kill()
    lives.kill()
    with arena.pool.lease(4, who="whole", timeout=60) as all_places:
        assert all_places.ids == IDS


@pytest.mark.parametrize("other", [1, 3], ids=["whole GPUs", "three places"])
def test_a_place_is_held_though_a_cleaner_removes_the_files(other: int, arena: Field) -> None:
    """Where the file is gone, the kernel has the names of the places."""
    (holder, neighbour) = arena.enter("holder", "neighbour", ids=ONE, places=2)
    (stranger,) = arena.enter("stranger", ids=ONE, places=other)
    lease(holder)
    assert holder.receive() == GOT
    shutil.rmtree(arena.directory)
    lease(neighbour)
    assert neighbour.receive() == GOT
    assert [holder.id for holder in arena.pool.holders()] == list(PLACES_OF_TWO)
    shutil.rmtree(arena.directory)
    lease(stranger)
    arena.await_waiting("stranger")
    with pytest.raises(LeaseTimeout, match=rf"GPU-a.place-1-of-2 is held by .* \(pid {holder.process.pid}\)"):
        arena.pool.lease(4, who="late", timeout=0).__enter__()
    holder.kill()
    release(neighbour)
    assert stranger.receive() == GOT


def test_a_whole_gpu_is_held_though_a_cleaner_removes_the_files(arena: Field) -> None:
    (holder,) = arena.enter("holder", ids=ONE)
    (sharer,) = arena.enter("sharer", ids=ONE, places=2)
    lease(holder)
    assert holder.receive() == GOT
    shutil.rmtree(arena.directory)
    lease(sharer)
    arena.await_waiting("sharer")
    # The sharer locks a place for the moment in which it looks whether the whole GPU is free.
    with pytest.raises(LeaseTimeout, match=r"GPU-a(\.place-1-of-2)? is held by"):
        shared(arena).lease(1, who="late", timeout=0).__enter__()
    release(holder)
    assert sharer.receive() == GOT


def test_files_alone_keep_sessions_apart_where_names_are_not_shared(
    arena: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers that share the directory, and no network namespace."""
    monkeypatch.setattr("pytest_distcompat.lease.directory.LeaseDirectory.claimed", lambda self, device: [])
    for number, places in enumerate((1, 2, 3)):
        (holder,) = arena.enter(f"holder {number}", ids=ONE, places=places)
        lease(holder)
        assert holder.receive() == GOT
        for others in {1, 2, 3} - {places}:
            pool = shared(arena, places=others)
            with pytest.raises(LeaseTimeout):
                pool.lease(1, who="other", timeout=0).__enter__()
        release(holder)


def test_sessions_with_and_without_places_that_fight_never_have_too_much(arena: Field, tmp_path: Path) -> None:
    ground = tmp_path / "ground"
    ground.mkdir()
    sharers = [f"sharer {number}" for number in range(4)]
    fighters = arena.enter(*sharers, ids=IDS[:2], places=2)
    fighters += arena.enter("whole 0", "whole 1", ids=IDS[:2])
    for number, fighter in enumerate(fighters):
        fighter.send(f"fight 12 {number} {ground}")
    assert len(fighters) == 6
    for fighter in fighters:
        assert fighter.receive() == ["fought"]
    assert not arena.pool.holders()
    assert not arena.pool._queue.waiting()


def test_a_test_that_starts_its_ranks_itself_has_the_whole_gpu(arena: Field) -> None:
    pool = shared(arena)
    with pool.lease(1, who="lent", whole=True):
        assert [holder.id for holder in pool.holders()] == ["GPU-a"]
        with pytest.raises(LeaseTimeout), lease_elsewhere(pool, 1, "neighbour"):
            pass
        # A script of two ranks, which the test starts.
        with pool.lease(2, who="script", timeout=0) as script:
            assert script.ids == ONE


def test_who_has_one_place_starts_no_two_ranks_on_it(arena: Field) -> None:
    pool = shared(arena)
    message = "script: 2 ranks need a GPU, and what starts them has it for 1"
    with pool.lease(1, who="run"):
        with pytest.raises(UsageProblem, match=message), pool.lease(2, who="script"):
            pass
        with pool.lease(1, who="script") as script:
            assert script.ids == ONE


def test_names_that_may_be_held_at_the_same_time() -> None:
    first, second = PLACES_OF_TWO
    assert may_be_held_beside(first, second)
    assert not any(may_be_held_beside(first, other) for other in (first, "GPU-a", "GPU-a.place-2-of-3"))
    assert not may_be_held_beside("GPU-a", "GPU-a")
    assert (places_in("GPU-a"), places_in(first), device_of(first)) == (1, 2, "GPU-a")
    older = "MIG-GPU-aaaa/3/0"
    assert device_of(f"{older}.place-1-of-2") == older
