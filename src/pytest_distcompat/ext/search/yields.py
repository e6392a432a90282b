"""Weights of the things that candidates are made of: a search draws more often what gave more, or what more branches wait for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pytest_distcompat.ext.search.candidate import Candidate

#: What a thing counts that was never tried: as if it had given so much in one trial.
_PRIOR = 2.0
#: More unreached branches that read a name do not count: ``enabled`` and ``dtype`` are read everywhere.
_MOST_READERS = 9


@dataclass
class Yields:
    """New branches and trials by family: the object of a setting, an option, a call. Empty, all are drawn alike.

    Attributes:
        readers: How many branches that no cell reaches read a name.
        branches: The square roots of the new branches of each trial, summed up, by family.
        trials: The number of trials by family.
    """

    readers: Mapping[str, int] = field(default_factory=dict)
    branches: dict[str, float] = field(default_factory=dict)
    trials: dict[str, int] = field(default_factory=dict)

    def add(self, candidate: Candidate, new_branches: int) -> None:
        """Note what a candidate gave; many branches of one trial count less than few of many."""
        for family in set(_families(candidate)):
            self.trials[family] = self.trials.get(family, 0) + 1
            self.branches[family] = self.branches.get(family, 0.0) + new_branches**0.5

    def of_setting(self, name: str) -> float:
        """Return the weight of a setting: that of its object, its own, and that of the branches that read it."""
        readers = min(self.readers.get(name.rpartition(".")[2], 0), _MOST_READERS)
        return (
            self._weight(_setting_family(name))
            * self._weight(f"setting {name}")
            * math.sqrt(1 + readers)
        )

    def of_option(self, name: str) -> float:
        """Return the weight of an option."""
        return self._weight(f"option {name}")

    def of_call(self, name: str) -> float:
        """Return the weight of a call."""
        return self._weight(f"call {name}")

    def _weight(self, family: str) -> float:
        return (_PRIOR + self.branches.get(family, 0.0)) / (1 + self.trials.get(family, 0))


def _families(candidate: Candidate) -> Iterator[str]:
    for name, _ in candidate.cell.options:
        if name != "set":
            yield f"option {name}"
    for setting in candidate.cell.set:
        name = setting.partition("=")[0]
        yield f"setting {name}"
        yield _setting_family(name)
    for call in candidate.calls:
        yield f"call {call.name}"


def _setting_family(name: str) -> str:
    """Return the object that has a setting: ``ds_config.zero_optimization`` of ``ds_config.zero_optimization.stage``."""
    return f"object {name.rpartition('.')[0]}"
