"""Parts of the check ``parity``: are parameters updated with the reference's hyperparameters?

The reference is a run of one process that trains the same model. ``checks.parity`` calls
``other_rates`` and ``other_hyperparameters`` after each step with the snapshots of all ranks: what
each rank recorded of its optimizer. They yield findings, such as ``all ranks: weight_decay of
'norm.weight' is 0.01; 0 in the reference``.

An optimizer has its numbers by param group: ``[{"lr": 0.001, "weight_decay": 0.01, ...}, ...]``. A
wrapper may regroup parameters, so the numbers are compared by parameter, under its name in the
unwrapped model (the model before anything wraps it).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Snapshots
from pytest_distcompat.excerpt import listed
from pytest_distcompat.model_values import Names
from pytest_distcompat.trace import RunTrace, Snapshot
from pytest_distcompat.wording import named_ranks

#: How far two numbers may be apart, relatively: a learning rate is a product of a few factors.
RATE_TOLERANCE = 1e-9
#: The numbers that are compared; ``betas.0`` is the first of ``betas``. An optimizer need not have
#: all of them, and further numbers that only some classes have are not compared.
HYPERPARAMETERS = ("lr", "weight_decay", "betas.0", "betas.1", "eps", "momentum")
#: The hyperparameters of a param group: ``{"lr": 0.001, "weight_decay": 0.01}``.
_GroupNumbers = Mapping[str, float]
#: Unwrapped name -> the numbers of the parameter's group.
Numbers = Mapping[str, _GroupNumbers]


def other_rates(snapshots: Snapshots, reference: Snapshot) -> Iterator[str]:
    """Yield a finding for each rank whose param groups have other learning rates.

    They are compared after the step. A trainer without a scheduler may set the rate of a step as it
    begins: then the rates with which the optimizer stepped count.
    """
    expected = _rates(reference)
    for snapshot in snapshots:
        rates = _rates(snapshot)
        if not _same_rates(rates, expected) and not _stepped_alike(snapshot, reference):
            yield (
                f"rank {snapshot.rank}: the learning rate is {_listed(rates)}; "
                f"{_listed(expected)} in the reference"
            )


#: The learning rate of each param group; None for a group without one.
_Rates = list[float | None]


def _rates(snapshot: Snapshot) -> _Rates:
    """Return the learning rate of each param group of a rank: ``[0.001, 0.001]``."""
    return [group.get("lr") for group in snapshot.param_groups]


def _stepped_alike(snapshot: Snapshot, reference: Snapshot) -> bool:
    """Tell whether a rank without a scheduler has stepped with the reference's learning rates."""
    rates = _rates_of_steps(snapshot)
    expected = _rates_of_steps(reference)
    if snapshot.scheduler or not rates or not expected:
        return False
    return _same_rates(rates, expected)


def _rates_of_steps(snapshot: Snapshot) -> _Rates:
    """Return the learning rate of each param group in the optimizer's steps."""
    rates: _Rates = []
    for step in snapshot.steps:
        rates += [group.get("lr") for group in step.param_groups]
    return rates


def _same_rates(rates: _Rates, expected: _Rates) -> bool:
    """Tell whether the learning rates of groups are equal. None and 0 are equal, too."""
    # A trainer may split its groups. If all groups have one rate, their number does not matter.
    if len(set(expected)) == len(set(rates)) == 1:
        return _same_rate(rates[0], expected[0])
    # Groups that only one side has are not compared here: ``other_hyperparameters`` compares the
    # rates by parameter.
    for rate, expected_rate in zip(rates, expected, strict=False):
        if not _same_rate(rate, expected_rate):
            return False
    return True


def _same_rate(rate: float | None, expected: float | None) -> bool:
    """Tell whether two learning rates are equal but for rounding; None is taken for 0."""
    return math.isclose(rate or 0, expected or 0, rel_tol=RATE_TOLERANCE)


def _listed(rates: _Rates) -> str:
    """Return learning rates as text, equal ones once: ``0.001, none``."""
    texts = []
    for rate in dict.fromkeys(rates):
        text = "none" if rate is None else f"{rate:.6g}"
        texts.append(text)
    return ", ".join(texts) or "none"


@dataclass(frozen=True)
class _OtherNumber:
    """A hyperparameter that is not the reference's."""

    #: Its name: ``weight_decay``.
    key: str
    #: Its value on a rank.
    number: float
    #: Its value in the reference.
    reference: float

    def __str__(self) -> str:
        return f"{self.number:.6g}; {self.reference:.6g} in the reference"


@dataclass
class _Places:
    """Where a hyperparameter is wrong: on which ranks, and for which parameters (by name)."""

    ranks: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


def other_hyperparameters(
    cell: Cell,
    snapshots: Snapshots,
    numbers_by_rank: list[Numbers],
    expected: list[Numbers],
) -> Iterator[str]:
    """Yield a finding for each hyperparameter that is wrong for some parameters.

    Parameters with the same wrong number are in one finding.

    Args:
        cell: The cell.
        snapshots: The snapshots of all ranks after a step.
        numbers_by_rank: For each of these snapshots, in the same order: parameter -> its numbers.
        expected: The same for the reference: a list of one, or of none if it recorded nothing.
    """
    expected_by_name = expected[0] if expected else {}
    places_by_number: dict[_OtherNumber, _Places] = defaultdict(_Places)
    for snapshot, numbers in zip(snapshots, numbers_by_rank, strict=True):
        for name in numbers.keys() & expected_by_name.keys():
            for other in _unequal(numbers[name], expected_by_name[name]):
                places_by_number[other].ranks.add(snapshot.rank)
                places_by_number[other].names.add(name)
    for other, places in places_by_number.items():
        where = named_ranks(sorted(places.ranks), cell.world_size)
        names = listed(sorted(places.names))
        yield f"{where}: {other.key} of {names} is {other}"


def _unequal(numbers: _GroupNumbers, expected: _GroupNumbers) -> Iterator[_OtherNumber]:
    """Yield each hyperparameter that both groups have and that differs."""
    for key in HYPERPARAMETERS:
        number = numbers.get(key)
        reference = expected.get(key)
        if number is None or reference is None:
            continue
        if not math.isclose(number, reference, rel_tol=RATE_TOLERANCE):
            yield _OtherNumber(key, number, reference)


class NumbersOfParameters:
    """Hyperparameters of each parameter in the steps of a run.

    The probe records the numbers of param groups in each step, but only in some steps which group a
    parameter is in (with the gradients of single parameters). So an object of this class remembers
    the groups of the last step that has them. Call ``after_step`` for one step after the other.
    """

    def __init__(self, run: RunTrace) -> None:
        #: Returns the unwrapped name of a parameter, given its name on a rank. Without a record of
        #: the unwrapped model it is the name on the rank (``str`` returns a text as it is).
        self._unwrapped_name: Callable[[str], str] = str
        if run.unwrapped:
            self._unwrapped_name = Names(run, run.unwrapped)
        #: (rank, number of the optimizer step within the trainer's step) -> parameter -> number of
        #: its param group. A trainer with two optimizers has the optimizer steps 0 and 1.
        self._groups: dict[tuple[int, int], dict[str, int]] = {}

    def after_step(self, snapshots: Snapshots) -> list[Numbers]:
        """Return for each snapshot: unwrapped name of a parameter -> its hyperparameters."""
        return [self._of_rank(snapshot) for snapshot in snapshots]

    def _of_rank(self, snapshot: Snapshot) -> Numbers:
        """Return the hyperparameters of each parameter of a rank, by unwrapped name."""
        numbers: dict[str, _GroupNumbers] = {}
        for nth, step in enumerate(snapshot.steps):
            place = (snapshot.rank, nth)
            if step.gradients:
                groups: dict[str, int] = {}
                for info in step.gradients:
                    name = self._unwrapped_name(info.name)
                    groups[name] = info.group
                self._groups[place] = groups
            for name, group in self._groups.get(place, {}).items():
                # The optimizer may have fewer groups now than when the groups were recorded.
                if group < len(step.param_groups):
                    numbers[name] = step.param_groups[group]
        return numbers
