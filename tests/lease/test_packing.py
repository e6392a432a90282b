"""The order in which to ask keeps the devices busy, by the rule of the real queue."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from tests.lease.simulation import simulate

from pytest_distcompat.lease import Demand, Span, pack
from pytest_distcompat.lease.packing import expect, ideal
from pytest_distcompat.lease.tickets import Ticket, ahead

DEVICES = WORKERS = 8


def forty(seed: int) -> list[Demand]:
    """40 tests of world sizes 1, 2 and 4 that last 5 to 60 seconds."""
    chance = random.Random(seed)
    return [Demand(f"test {number}", chance.choice((1, 2, 4)), chance.uniform(5, 60)) for number in range(40)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("in_hand", [1, 2])
def test_forty_tests_on_eight_devices_stay_near_the_ideal(seed: int, in_hand: int) -> None:
    schedule = simulate(pack(forty(seed), DEVICES, WORKERS), DEVICES, WORKERS, in_hand=in_hand)
    assert schedule.ideal <= schedule.makespan <= 1.15 * schedule.ideal


def test_the_same_demands_are_packed_the_same() -> None:
    assert pack(forty(0), DEVICES, 4) == pack(forty(0), DEVICES, 4)


@pytest.mark.parametrize("seed", range(20))
def test_demands_of_unknown_duration_are_packed_the_same(seed: int) -> None:
    """All that is left is the world size, and what happens is not what was expected."""
    real = {demand.id: demand for demand in forty(seed)}
    order = pack([Demand(demand.id, demand.world_size) for demand in real.values()], DEVICES, WORKERS)
    schedule = simulate([real[demand.id] for demand in order], DEVICES, WORKERS)
    unpacked = simulate(real.values(), DEVICES, WORKERS)
    assert schedule.makespan <= 1.25 * schedule.ideal
    assert schedule.makespan <= 1.05 * unpacked.makespan


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("workers", [1, 3, 8, 40])
def test_a_schedule_runs_all_and_shares_nothing(seed: int, workers: int) -> None:
    demands = forty(seed)
    schedule = simulate(demands, DEVICES, workers)
    spans = {span.who: span for span in schedule.spans}
    assert len(spans) == len(schedule.spans) == len(demands)
    for demand in demands:
        span = spans[demand.id]
        assert len(set(span.ids)) == demand.world_size
        assert span.asked <= span.got
        assert span.released == pytest.approx(span.got + demand.expected())
    for group in (by_device(schedule.spans), by_worker(schedule.spans)):
        for of_one in group:
            for first, second in itertools.pairwise(of_one):
                assert first.released <= second.got


def by_device(spans: tuple[Span, ...]) -> list[list[Span]]:
    return [in_order(span for span in spans if name in span.ids) for name in {n for span in spans for n in span.ids}]


def by_worker(spans: tuple[Span, ...]) -> list[list[Span]]:
    return [in_order(span for span in spans if span.pid == worker) for worker in {span.pid for span in spans}]


def in_order(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: span.got)


def test_no_request_overtakes_an_earlier_one() -> None:
    """One waits for four devices, of which three are free: those who ask later wait too."""
    demands = [Demand("long", 1, 10.0), Demand("large", 4, 1.0), *(Demand(f"small {n}", 1, 1.0) for n in range(3))]
    spans = simulate(demands, devices=4, workers=5, in_hand=1).spans
    assert [(span.who, span.got) for span in spans[:2]] == [("long", 0.0), ("large", 10.0)]
    assert {span.got for span in spans[2:]} == {11.0}


def test_workers_have_their_next_test_in_hand() -> None:
    """A test that a worker holds waits for that worker, though another is idle."""
    demands = [Demand("long", 1, 10.0), Demand("other", 1, 1.0), Demand("next", 1, 1.0)]
    begins = {span.who: span.got for span in simulate(demands, devices=2, workers=2, in_hand=2).spans}
    assert begins == {"long": 0.0, "next": 10.0, "other": 0.0}
    begins = {span.who: span.got for span in simulate(demands, devices=2, workers=2, in_hand=1).spans}
    assert begins == {"long": 0.0, "other": 0.0, "next": 1.0}


def test_a_long_test_of_one_rank_goes_first_if_all_wait_for_it_in_the_end() -> None:
    demands = [Demand("long", 1, 100.0), *(Demand(f"large {number}", 4, 10.0) for number in range(8))]
    order = pack(demands, devices=8, workers=8)
    assert order[0].id == "long"
    assert simulate(order, devices=8, workers=8, in_hand=1).makespan == 100.0


def test_an_unknown_duration_is_that_of_tests_of_its_size() -> None:
    demands = [Demand("a", 2, 4.0), Demand("b", 2, 6.0), Demand("c", 1, 1.0), Demand("d", 2), Demand("e", 4)]
    assert [demand.seconds for demand in expect(demands)] == [4.0, 6.0, 1.0, 5.0, 4.0]
    assert [demand.seconds for demand in expect([Demand("a", 1)])] == [1.0]


def test_an_unknown_duration_grows_with_the_number_of_items() -> None:
    """A cell of a suite is many items."""
    assert [demand.seconds for demand in expect([Demand("a", 2, 40.0, 20), Demand("b", 2, items=5)])] == [40.0, 10.0]
    assert [demand.seconds for demand in expect([Demand("a", 1, items=7)])] == [7.0]


def test_the_ideal_is_the_busy_machine_or_the_longest_test() -> None:
    assert ideal([Demand("a", 2, 4.0), Demand("b", 4, 4.0)], devices=8, workers=8) == 4.0
    assert ideal([Demand("a", 4, 4.0), Demand("b", 4, 6.0), Demand("c", 4, 6.0)], devices=8, workers=8) == 8.0
    assert ideal([Demand("a", 1, 4.0), Demand("b", 1, 6.0)], devices=8, workers=1) == 10.0
    assert ideal([], devices=8, workers=8) == 0.0


def test_nothing_to_do_takes_no_time() -> None:
    assert pack([], devices=8, workers=2) == []
    assert simulate([], devices=8, workers=2).makespan == 0.0


def test_a_group_larger_than_the_machine_takes_all_of_it() -> None:
    assert len(simulate([Demand("wide", 40, 1.0)], devices=2, workers=1).spans[0].ids) == 2


def test_earlier_requests_for_the_same_device_are_ahead_nearest_first() -> None:
    first, second, third = (Ticket(n, ids, 1, "") for n, ids in ((1, ("a", "b")), (2, ("c",)), (3, ("b", "c"))))
    assert ahead(third, [first, second, third]) == [second, first]
    assert ahead(second, [first, second, third]) == []
