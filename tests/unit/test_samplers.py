"""Data sets and samplers that loaders of built-in drivers read."""

from __future__ import annotations

from pytest_distcompat.ext.upstream.drivers._samplers import batches_in_order


def test_the_last_batch_has_the_rows_that_are_left() -> None:
    assert [batch.tolist() for batch in batches_in_order(5, 2)] == [[0, 1], [2, 3], [4]]
