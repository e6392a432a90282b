"""The option ``--distcompat-simulate``; what it does is imported when it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.plugin.options import Option, count

if TYPE_CHECKING:
    from pytest_distcompat.ext.simulation.substitute import Simulation
    from pytest_distcompat.plugin.session import DistcompatSession

OPTION = Option(
    "simulate",
    "N",
    "0",
    count(least=0),
    "Run no ranks: simulate each cell of a suite as N ranks, without values "
    "(default: 0, run them).",
)


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_options() -> list[Option]:
    """Add the option."""
    return [OPTION]


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_substitute(session: DistcompatSession) -> Simulation | None:
    """Simulate the ranks, if it is asked for."""
    world_size = int(session.setting("simulate").value)
    if not world_size:
        return None
    from pytest_distcompat.ext.simulation.substitute import Simulation

    return Simulation(world_size)
