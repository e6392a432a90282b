"""pytest plugin with the option ``--distcompat-simulate N``.

If it is given, suites get simulated ranks in place of real ones (``substitute``): one process
trains on fake tensors, which have shapes and dtypes, but no values. Otherwise nothing else of this
extension is imported.
"""

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
    """Return what replaces the ranks, if the option is given; else None.

    ``plugin.session`` calls the hook, once a session.
    """
    world_size = int(session.setting("simulate").value)
    if not world_size:
        return None
    from pytest_distcompat.ext.simulation.substitute import Simulation

    return Simulation(world_size)
