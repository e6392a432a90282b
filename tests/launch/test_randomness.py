"""Seeds set at import, which all ranks share, and random numbers drawn at import, which each rank draws itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from pytest_distcompat.launch import randomness

#: How to seed each generator, and how to draw so many numbers from it.
GENERATORS: dict[str, tuple[Callable[[int], object], Callable[[int], list[float]]]] = {
    "random": (random.seed, lambda count: [random.random() for _ in range(count)]),
    "numpy": (np.random.seed, lambda count: np.random.rand(count).tolist()),  # noqa: NPY002 - the global one
    "torch": (torch.manual_seed, lambda count: torch.rand(count).tolist()),
}


@pytest.fixture(autouse=True)
def own_generators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(randomness, "_seeded", {})
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - the global one
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002 - the global one
    torch.set_rng_state(before[2])


def ranks_draw(draw: Callable[[int], list[float]]) -> tuple[list[float], list[float]]:
    """Return the numbers that two ranks draw, one after the other in this process."""
    randomness.renew()
    first = draw(3)
    randomness.renew()
    return first, draw(3)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("count", [0, 1, 700, 5000])
def test_ranks_draw_their_own_numbers_though_some_were_drawn_at_import(name: str, count: int) -> None:
    seed, draw = GENERATORS[name]
    seed(random.SystemRandom().randrange(2**32))
    before = randomness.states()
    draw(count)
    randomness.remember_seeds(before)
    first, second = ranks_draw(draw)
    assert first != second


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_ranks_go_on_from_a_seed_at_import(name: str, count: int) -> None:
    seed, draw = GENERATORS[name]
    before = randomness.states()
    seed(3)
    draw(count)
    randomness.remember_seeds(before)
    first, second = ranks_draw(draw)
    seed(3)
    assert first == second == draw(count + 3)[count:]


def test_a_seed_at_import_is_that_of_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seeds = randomness.states(), list[int]()
    torch.manual_seed(3)
    randomness.remember_seeds(before)
    torch.manual_seed(4)  # what an earlier request of a reused rank did
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    randomness.renew()
    assert seeds == [3]
