"""As much of ``datasets`` as accelerate's checkpoint script calls: pairs of sentences made on the spot, no network."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

WORDS = 40


class Split(list[dict[str, Any]]):
    """The rows of one split."""


class IterableDataset:
    """Asked for by accelerate where the real library is installed beside this one."""


class Splits(dict[str, Split]):
    """The splits of one data set."""

    def map(self, function: Callable[..., Any], *, remove_columns: list[str], **_: Any) -> Splits:
        """``batched=True``: the function gets columns, and gives columns."""
        return Splits({name: _mapped(split, function, remove_columns) for name, split in self.items()})

    def rename_column(self, old: str, new: str) -> Splits:
        renamed = {
            name: Split({new if key == old else key: value for key, value in row.items()} for row in split)
            for name, split in self.items()
        }
        return Splits(renamed)


def _mapped(split: Split, function: Callable[..., Any], removed: list[str]) -> Split:
    made = function({key: [row[key] for row in split] for key in split[0]})
    kept = [{key: value for key, value in row.items() if key not in removed} for row in split]
    return Split(row | {key: made[key][place] for key in made} for place, row in enumerate(kept))


def load_dataset(*_: Any) -> Splits:
    """Three optimizer steps of two ranks, and something to evaluate."""
    numbers = random.Random(0)

    def row(place: int) -> dict[str, Any]:
        first, second = (" ".join(f"w{numbers.randrange(WORDS)}" for _ in range(8)) for _ in range(2))
        return {"sentence1": first, "sentence2": second, "label": numbers.randrange(2), "idx": place}

    return Splits(train=Split(map(row, range(96))), validation=Split(map(row, range(32))))
