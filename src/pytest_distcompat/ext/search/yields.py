"""Weights of options, settings and calls: how often a search draws each of them.

A search tries *candidates*: a cell of a driver with options and settings, perhaps with calls of the
live trainer. It looks for branches of library code that no cell reaches. A candidate *yields* the
branches that it is the first to reach. What has yielded many branches so far is drawn more often.
So are settings that many unreached branches read.

``guide`` adds each trial by ``Yields.add``, and ``space`` asks for weights when it draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pytest_distcompat.ext.search.candidate import Candidate

#: The weight of what was never tried: as if one trial of it had yielded this much.
_PRIOR = 2.0
#: The most branches that count for a name. ``enabled`` and ``dtype`` are read everywhere.
_MOST_READERS = 9


@dataclass
class Yields:
    """What candidates have yielded, by family.

    A family is an option (``option model``), a call (``call export``), a setting (``setting
    AdamW.eps``), or all settings of an object (``object AdamW``). Without trials all have the same
    weight.

    Attributes:
        readers: Name of a setting's field -> how many unreached branches have that name in their
            condition.
        branches: Family -> sum, over its trials, of the square root of the number of new branches.
        trials: Family -> number of trials.
    """

    readers: Mapping[str, int] = field(default_factory=dict)
    branches: dict[str, float] = field(default_factory=dict)
    trials: dict[str, int] = field(default_factory=dict)

    def add(self, candidate: Candidate, new_branches: int) -> None:
        """Add what a candidate yielded to the families of all of its parts.

        Because of the square root, a few branches in each of many trials count more than many
        branches in one trial.
        """
        yielded = new_branches**0.5
        for family in set(_families(candidate)):
            self.trials[family] = self.trials.get(family, 0) + 1
            self.branches[family] = self.branches.get(family, 0.0) + yielded

    def of_setting(self, name: str) -> float:
        """Return the weight of a setting such as ``ds_config.zero_optimization.stage``.

        It is a product of the weights of its object and of the setting itself, and of a factor for
        the unreached branches that read its field.
        """
        _, _, field_name = name.rpartition(".")
        readers = min(self.readers.get(field_name, 0), _MOST_READERS)
        of_object = self._weight(_setting_family(name))
        own = self._weight(f"setting {name}")
        return of_object * own * math.sqrt(1 + readers)

    def of_option(self, name: str) -> float:
        """Return the weight of an option, such as ``model``."""
        return self._weight(f"option {name}")

    def of_call(self, name: str) -> float:
        """Return the weight of a call, by the name of its method."""
        return self._weight(f"call {name}")

    def _weight(self, family: str) -> float:
        """Return the mean yield of a trial of that family, ``_PRIOR`` counted as one trial."""
        branches = self.branches.get(family, 0.0)
        trials = self.trials.get(family, 0)
        return (_PRIOR + branches) / (1 + trials)


def _families(candidate: Candidate) -> Iterator[str]:
    """Yield the families that a candidate is a trial of."""
    for name, _ in candidate.cell.options:
        if name != "set":
            yield f"option {name}"
    for setting in candidate.cell.set:
        name, _, _ = setting.partition("=")
        yield f"setting {name}"
        yield _setting_family(name)
    for call in candidate.calls:
        yield f"call {call.name}"


def _setting_family(name: str) -> str:
    """Return the family of all settings of one object.

    The setting ``ds_config.zero_optimization.stage`` is of the object
    ``ds_config.zero_optimization``.
    """
    object_name, _, _ = name.rpartition(".")
    return f"object {object_name}"
