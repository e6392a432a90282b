"""How often a search draws each option, setting and call, by what candidates with it have reached.

A candidate yields the branches of library code that it reaches and no earlier one did. What yielded
many branches is drawn more often, and so are settings that many unreached branches read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pytest_distcompat.ext.search.candidate import Candidate

#: Added to each yield, so that what was never tried counts as if one trial of it had yielded so
#: much.
_PRIOR = 2.0
#: At most so many branches that read a name count: ``enabled`` and ``dtype`` are read everywhere.
_MOST_READERS = 9


@dataclass
class Yields:
    """What candidates have yielded, by family.

    A family is an option, a call, a setting, or all settings of an object. Without any trials, all
    are drawn equally often.

    Attributes:
        readers: By the name of a setting's field, how many unreached branches read such a field.
        branches: By family, the sum over its trials of the square root of the new branches.
        trials: By family, the number of trials.
    """

    readers: Mapping[str, int] = field(default_factory=dict)
    branches: dict[str, float] = field(default_factory=dict)
    trials: dict[str, int] = field(default_factory=dict)

    def add(self, candidate: Candidate, new_branches: int) -> None:
        """Add what a candidate yielded.

        By the square root, a few branches in each of many trials count more than many in one trial.
        """
        yielded = new_branches**0.5
        for family in set(_families(candidate)):
            self.trials[family] = self.trials.get(family, 0) + 1
            self.branches[family] = self.branches.get(family, 0.0) + yielded

    def of_setting(self, name: str) -> float:
        """Return the weight of a setting: by its object, the setting itself, and its readers."""
        _, _, field_name = name.rpartition(".")
        readers = min(self.readers.get(field_name, 0), _MOST_READERS)
        of_object = self._weight(_setting_family(name))
        own = self._weight(f"setting {name}")
        return of_object * own * math.sqrt(1 + readers)

    def of_option(self, name: str) -> float:
        """Return the weight of an option."""
        return self._weight(f"option {name}")

    def of_call(self, name: str) -> float:
        """Return the weight of a call."""
        return self._weight(f"call {name}")

    def _weight(self, family: str) -> float:
        """Return the mean yield of a trial of that family."""
        branches = self.branches.get(family, 0.0)
        trials = self.trials.get(family, 0)
        return (_PRIOR + branches) / (1 + trials)


def _families(candidate: Candidate) -> Iterator[str]:
    """Yield the families that the parts of a candidate belong to."""
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
    """Return the family of all settings of the object that has this one.

    Of ``ds_config.zero_optimization.stage`` the object is ``ds_config.zero_optimization``.
    """
    object_name, _, _ = name.rpartition(".")
    return f"object {object_name}"
