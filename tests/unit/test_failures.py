"""The exceptions are one tree, and its docstring draws it."""

from __future__ import annotations

import inspect

import pytest

from pytest_distcompat import failures


def test_all_are_distcompat_errors() -> None:
    classes = [
        value for _, value in inspect.getmembers(failures, inspect.isclass) if value.__module__ == failures.__name__
    ]
    assert len(classes) > 3
    for exception in classes:
        assert issubclass(exception, failures.DistcompatError)
    assert issubclass(failures.LateFailure, failures.Incompatible)


@pytest.mark.parametrize(
    ("failure", "base"), [(failures.Incompatible, AssertionError), (failures.UsageProblem, ValueError)]
)
def test_errors_are_subclasses_of_pythons_own(failure: type[Exception], base: type[Exception]) -> None:
    assert issubclass(failure, base)
