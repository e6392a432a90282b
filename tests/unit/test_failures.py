"""The exceptions are one tree, and its docstring draws it."""

from __future__ import annotations

import inspect

import pytest

from pytest_distcompat import failures


def drawn() -> dict[str, str]:
    """Name to parent, as the module's docstring draws them by indentation."""
    tree = (failures.__doc__ or "").partition("The tree::")[2]
    parents: dict[str, str] = {}
    above: dict[int, str] = {}
    for line in filter(None, tree.splitlines()):
        depth = len(line) - len(line.lstrip())
        name = line.split()[0]
        parents[name] = next((above[d] for d in sorted(above, reverse=True) if d < depth), "Exception")
        above = {d: other for d, other in above.items() if d < depth} | {depth: name}
    return parents


def test_the_drawn_tree_is_the_real_one() -> None:
    real = {name: cls.__mro__[1].__name__ for name, cls in inspect.getmembers(failures, inspect.isclass)}
    assert drawn() == real


@pytest.mark.parametrize(
    ("failure", "base"), [(failures.Incompatible, AssertionError), (failures.UsageProblem, ValueError)]
)
def test_errors_are_subclasses_of_pythons_own(failure: type[Exception], base: type[Exception]) -> None:
    assert issubclass(failure, base)
