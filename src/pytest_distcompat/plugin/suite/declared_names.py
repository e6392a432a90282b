"""Checks that names in a suite's declarations exist.

A *suite* is a subclass of ``CompatSuite`` with the attributes ``driver``, ``matrix`` and
``expect``. A misspelled name in it would be ignored silently, and what it declares would not hold.
So at collection ``suite_class.validate`` calls ``check_names`` for each *expectation* in
``expect``, and the hook ``pytest_pycollect_makeitem`` calls ``check_attributes``.
``DistcompatSession.own`` calls ``check_names`` for the expectations in the user's known issues.

An expectation is, say, ``fails("names", strategy=("fsdp1", "fsdp2"))``: the check of that name
fails in the cells that have these *facets*, ``(("strategy", ("fsdp1", "fsdp2")),)``. A facet is a
property of a cell, a point of the matrix: strategy, precision, number of ranks, or an option.
"""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from pytest_distcompat.cell import Matrix
from pytest_distcompat.checks import find_check
from pytest_distcompat.compat_suite import CompatSuite
from pytest_distcompat.expect import Expectation
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.registry import Registry
from pytest_distcompat.strategies import STRATEGIES

#: The attributes of a suite's class -> the type of its value, by which a misspelled one is
#: recognized. The value of ``expect`` is a tuple of expectations.
_ATTRIBUTES = {"driver": str, "matrix": Matrix, "expect": Expectation}
#: The arguments of ``Matrix``, as ``strategies``.
_MATRIX_FIELDS = tuple(field.name for field in fields(Matrix))


def check_names(expectation: Expectation) -> None:
    """Raise UsageProblem, with the known names, for an unknown check, strategy or precision."""
    # ``*`` stands for all checks. ``find_check`` and ``get`` raise for a name that is not known.
    if expectation.check != "*":
        find_check(expectation.check)
    known: dict[str, Registry[Any]] = {"strategy": STRATEGIES, "precision": PRECISIONS}
    # Other facets, as options of cells, were checked when the expectation was made.
    for name, wanted in expectation.facets:
        if name not in known:
            continue
        values = wanted if isinstance(wanted, tuple) else (wanted,)
        for value in values:
            known[name].get(str(value))


def check_attributes(suite: type[CompatSuite]) -> None:
    """Raise UsageProblem for an attribute that is a misspelled or misplaced declaration.

    A class may have attributes of its own, as helpers of its driver. One that is called ``expects``
    and has expectations is a misspelled ``expect``. A misplaced one is ``strategies``, which is an
    argument of ``Matrix``.
    """
    for base in suite.__mro__:
        # Only classes of the user's that are suites: mixins may have what they like.
        if base is CompatSuite or not issubclass(base, CompatSuite):
            continue
        for name, value in vars(base).items():
            if name not in _ATTRIBUTES:
                _check_attribute(suite, name, value)


def _check_attribute(suite: type[CompatSuite], name: str, value: object) -> None:
    """Raise UsageProblem if an attribute that suites do not have looks like one that they have.

    Args:
        suite: The suite.
        name: The name of the attribute, as ``expects`` or ``strategies``.
        value: Its value.
    """
    values = [value]
    if isinstance(value, (tuple, list)):
        values = [*value]
        if name in _MATRIX_FIELDS:
            expected = f"matrix = Matrix({name}={value!r:.100})"
            raise UsageProblem(
                f"{suite.__name__}.{name} is no attribute of a suite; expected {expected}"
            )
    for close in difflib.get_close_matches(name, _ATTRIBUTES, n=1, cutoff=0.75):
        kind = _ATTRIBUTES[close]
        if any(isinstance(each, kind) for each in values):
            raise UsageProblem(
                f"{suite.__name__}.{name} is no attribute of a suite; did you mean {close}?"
            )
