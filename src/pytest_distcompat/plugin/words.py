"""Words in what is declared: those of checks, strategies and precisions that there are. Facets and options know their own."""

from __future__ import annotations

from typing import Any

from pytest_distcompat.checks import CHECKS
from pytest_distcompat.expect import Expectation
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.shelf import Shelf
from pytest_distcompat.strategies import STRATEGIES


def check_words(expectation: Expectation) -> None:
    """Raise UsageProblem, with the right words, for one that there is not: such an expectation is about nothing."""
    if expectation.check != "*":
        CHECKS.get(expectation.check)
    known: dict[str, Shelf[Any]] = {"strategy": STRATEGIES, "precision": PRECISIONS}
    for name, wanted in expectation.facets:
        if name in known:
            for value in wanted if isinstance(wanted, tuple) else (wanted,):
                known[name].get(str(value))
