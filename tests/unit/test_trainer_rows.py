"""Data sets that the loaders of Trainer read."""

from __future__ import annotations

import pytest

from pytest_distcompat.ext.upstream.drivers._rows import TRAINER_SETTINGS, trainer_dataset

ROWS = [3, 1, 2]


def test_an_uncounted_data_set_has_all_rows_and_no_length() -> None:
    data = trainer_dataset(ROWS, TRAINER_SETTINGS["iterable, uncounted"])
    # A list would ask for the length first.
    assert [row for row in data] == ROWS  # noqa: C416
    with pytest.raises(AttributeError, match="tells the length"):
        len(data)


@pytest.mark.parametrize(("loader", "counted"), [("shuffle", True), ("iterable", False)])
def test_other_data_sets(loader: str, counted: bool) -> None:
    data = trainer_dataset(ROWS, TRAINER_SETTINGS[loader])
    assert list(data) == ROWS
    assert hasattr(data, "__len__") == counted
