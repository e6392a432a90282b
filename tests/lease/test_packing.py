"""The order in which to ask keeps the devices busy, by the rule of the real queue."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from tests.lease.simulation import simulate

from pytest_distcompat.lease import Demand, Span, pack
from pytest_distcompat.lease.packing import expect, ideal
from pytest_distcompat.lease.tickets import Ticket, ahead

DEVICES = WORKERS = 8


def forty(seed: int) -> list[Demand]:
    """40 tests of world sizes 1, 2 and 4 that last 5 to 60 seconds."""
    chance = random.Random(seed)
    demands = []
    for number in range(40):
        world_size = chance.choice((1, 2, 4))
        seconds = chance.uniform(5, 60)
        demands.append(Demand(f"test {number}", world_size, seconds))
    return demands


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("in_hand", [1, 2])
def test_forty_tests_on_eight_devices_stay_near_the_ideal(seed: int, in_hand: int) -> None:
    order = pack(forty(seed), DEVICES, WORKERS)
    schedule = simulate(order, DEVICES, WORKERS, in_hand=in_hand)
    assert schedule.ideal <= schedule.makespan <= 1.15 * schedule.ideal


def test_the_same_demands_are_packed_the_same() -> None:
    assert pack(forty(0), DEVICES, 4) == pack(forty(0), DEVICES, 4)


@pytest.mark.parametrize("seed", range(20))
def test_demands_of_unknown_duration_are_packed_the_same(seed: int) -> None:
    """All that is left is the world size, and what happens is not what was expected."""
    real = {demand.id: demand for demand in forty(seed)}
    unknown = [Demand(demand.id, demand.world_size) for demand in real.values()]
    order = pack(unknown, DEVICES, WORKERS)
    packed = [real[demand.id] for demand in order]
    schedule = simulate(packed, DEVICES, WORKERS)
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
    assert_one_after_another(by_device(schedule.spans))
    assert_one_after_another(by_worker(schedule.spans))


def by_device(spans: tuple[Span, ...]) -> Mapping[str, list[Span]]:
    spans_by_device = defaultdict[str, list[Span]](list)
    for span in spans:
        for device in span.ids:
            spans_by_device[device].append(span)
    return spans_by_device


def by_worker(spans: tuple[Span, ...]) -> Mapping[int, list[Span]]:
    spans_by_worker = defaultdict[int, list[Span]](list)
    for span in spans:
        spans_by_worker[span.pid].append(span)
    return spans_by_worker


def assert_one_after_another(groups: Mapping[Any, list[Span]]) -> None:
    for spans in groups.values():
        in_order = sorted(spans, key=lambda span: span.got)
        for earlier, later in itertools.pairwise(in_order):
            assert earlier.released <= later.got


def test_no_request_overtakes_an_earlier_one() -> None:
    """One waits for four devices, of which three are free: those who ask later wait too."""
    demands = [Demand("long", 1, 10.0), Demand("large", 4, 1.0)]
    demands += [Demand(f"small {number}", 1, 1.0) for number in range(3)]
    schedule = simulate(demands, devices=4, workers=5, in_hand=1)
    long, large, *small = schedule.spans
    assert (long.who, long.got) == ("long", 0.0)
    assert (large.who, large.got) == ("large", 10.0)
    assert {span.got for span in small} == {11.0}


def test_workers_have_their_next_test_in_hand() -> None:
    """A test that a worker holds waits for that worker, though another is idle."""
    demands = [Demand("long", 1, 10.0), Demand("other", 1, 1.0), Demand("next", 1, 1.0)]
    two_in_hand = simulate(demands, devices=2, workers=2, in_hand=2)
    assert begins(two_in_hand.spans) == {"long": 0.0, "next": 10.0, "other": 0.0}
    one_in_hand = simulate(demands, devices=2, workers=2, in_hand=1)
    assert begins(one_in_hand.spans) == {"long": 0.0, "other": 0.0, "next": 1.0}


def begins(spans: Iterable[Span]) -> dict[str, float]:
    return {span.who: span.got for span in spans}


def test_a_long_test_of_one_rank_goes_first_if_all_wait_for_it_in_the_end() -> None:
    large = [Demand(f"large {number}", 4, 10.0) for number in range(8)]
    order = pack([Demand("long", 1, 100.0), *large], devices=8, workers=8)
    assert order[0].id == "long"
    schedule = simulate(order, devices=8, workers=8, in_hand=1)
    assert schedule.makespan == 100.0


def test_an_unknown_duration_is_that_of_tests_of_its_size() -> None:
    known = [Demand("a", 2, 4.0), Demand("b", 2, 6.0), Demand("c", 1, 1.0)]
    unknown = [Demand("d", 2), Demand("e", 4)]
    assert expected_seconds([*known, *unknown]) == [4.0, 6.0, 1.0, 5.0, 4.0]
    assert expected_seconds([Demand("a", 1)]) == [1.0]


def test_an_unknown_duration_grows_with_the_number_of_items() -> None:
    """A cell of a suite is many items."""
    known = Demand("a", 2, 40.0, 20)
    unknown = Demand("b", 2, items=5)
    assert expected_seconds([known, unknown]) == [40.0, 10.0]
    assert expected_seconds([Demand("a", 1, items=7)]) == [7.0]


def expected_seconds(demands: list[Demand]) -> list[float | None]:
    return [demand.seconds for demand in expect(demands)]


def test_the_ideal_is_the_busy_machine_or_the_longest_test() -> None:
    two_that_fit = [Demand("a", 2, 4.0), Demand("b", 4, 4.0)]
    assert ideal(two_that_fit, devices=8, workers=8) == 4.0
    three_for_half_each = [Demand("a", 4, 4.0), Demand("b", 4, 6.0), Demand("c", 4, 6.0)]
    assert ideal(three_for_half_each, devices=8, workers=8) == 8.0
    two_for_one_worker = [Demand("a", 1, 4.0), Demand("b", 1, 6.0)]
    assert ideal(two_for_one_worker, devices=8, workers=1) == 10.0
    assert ideal([], devices=8, workers=8) == 0.0


def test_nothing_to_do_takes_no_time() -> None:
    assert pack([], devices=8, workers=2) == []
    assert simulate([], devices=8, workers=2).makespan == 0.0


def test_a_group_larger_than_the_machine_takes_all_of_it() -> None:
    schedule = simulate([Demand("wide", 40, 1.0)], devices=2, workers=1)
    assert len(schedule.spans[0].ids) == 2


def test_earlier_requests_for_the_same_device_are_ahead_nearest_first() -> None:
    first = Ticket(1, ("a", "b"), 1, "")
    second = Ticket(2, ("c",), 1, "")
    third = Ticket(3, ("b", "c"), 1, "")
    assert ahead(third, [first, second, third]) == [second, first]
    assert ahead(second, [first, second, third]) == []
