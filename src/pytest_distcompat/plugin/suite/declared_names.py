"""Words in what is declared: those of checks, strategies and precisions that there are. Facets and options know their own."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from pytest_distcompat.cell import Matrix
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.expect import Expectation
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.registry import Registry
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.suite import CompatSuite

#: What a suite's class says, and of what kind that is.
_ATTRIBUTES = {"driver": str, "matrix": Matrix, "expect": Expectation}
_OF_MATRIX = tuple(field.name for field in fields(Matrix))


def check_words(expectation: Expectation) -> None:
    """Raise UsageProblem, with the right words, for one that there is not: such an expectation is about nothing."""
    if expectation.check != "*":
        CHECKS.get(expectation.check)
    known: dict[str, Registry[Any]] = {"strategy": STRATEGIES, "precision": PRECISIONS}
    for name, wanted in expectation.facets:
        if name in known:
            for value in wanted if isinstance(wanted, tuple) else (wanted,):
                known[name].get(str(value))


def check_attributes(suite: type[CompatSuite]) -> None:
    """Raise UsageProblem for an attribute that is meant for us, by its name and its value, and that nobody reads."""
    ours = [one for one in suite.__mro__ if one is not CompatSuite and issubclass(one, CompatSuite)]
    for name, value in (said for one in ours for said in vars(one).items() if said[0] not in _ATTRIBUTES):
        values = value if isinstance(value, (tuple, list)) else (value,)
        if name in _OF_MATRIX and isinstance(value, (tuple, list)):
            raise UsageProblem(
                f"{suite.__name__}.{name} is read by nobody; expected matrix = Matrix({name}={value!r:.100})"
            )
        close = difflib.get_close_matches(name, _ATTRIBUTES, n=1, cutoff=0.75)
        if close and any(isinstance(one, _ATTRIBUTES[close[0]]) for one in values):
            raise UsageProblem(f"{suite.__name__}.{name} is read by nobody; did you mean {close[0]}?")
