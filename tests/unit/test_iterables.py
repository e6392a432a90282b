"""Loaders of plain torch that keep a state per rank: uneven rows, another order in each epoch, and the rows after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_distcompat.driver import RESUME_AT
from pytest_distcompat.ext.upstream.drivers import _iterables, _rows

COUNT = 23


def read(rank: int, directory: Path, start: tuple[int, int] = (0, 0)) -> list[tuple[int, list[int]]]:
    """Return the batches of one of two ranks."""
    batches = _iterables.rows(_rows.BY_RANK, COUNT, start, directory, part=(rank, 2), file=str(rank))
    return [(epoch, list(rows)) for epoch, rows in batches]


def flat(batches: list[tuple[int, list[int]]], epoch: int) -> list[int]:
    """Return the rows of an epoch in their order."""
    rows_of_epoch = []
    for number, rows in batches:
        if number == epoch:
            rows_of_epoch.extend(rows)
    return rows_of_epoch


def test_two_ranks_share_the_rows_unevenly_and_another_way_in_each_epoch(tmp_path: Path) -> None:
    by_rank = [read(rank, tmp_path) for rank in (0, 1)]
    for epoch in (0, 1):
        first, second = (flat(batches, epoch) for batches in by_rank)
        assert sorted(first + second) == list(range(COUNT))
        assert len(first) > len(second) + 2
    assert flat(by_rank[0], 0) != flat(by_rank[0], 1)


@pytest.mark.parametrize("start", RESUME_AT)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_goes_on_with_its_own_rows(rank: int, start: tuple[int, int], tmp_path: Path) -> None:
    whole = read(rank, tmp_path)
    epoch, done = start
    left = [batch for batch in whole if batch[0] == epoch][done:]
    assert read(rank, tmp_path, start) == left
