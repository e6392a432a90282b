"""pytest plugin of reach: the option ``--distcompat-reach FILE``.

With it a session records which functions and branches of the installed libraries its test cells
execute in their *ranks*, the processes that train, and writes that *map* to the file. pytest loads
this module by the entry point ``distcompat-reach``; the core of the plugin calls the two hooks at
its end. All else is imported when the option is given.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.plugin.options import Option

if TYPE_CHECKING:
    from pytest_distcompat.plugin.session import DistcompatSession


def _read_path(text: str, base: Path) -> Path | None:
    """Return the path of a map's file; None for an empty text."""
    if not text:
        return None
    path = base / text
    if path.is_dir():
        raise UsageProblem(f"{str(path)!r} is a directory; expected a file.")
    directory = path.absolute().parent
    if not directory.is_dir():
        raise UsageProblem(f"{str(path)!r}: there is no directory {directory}.")
    if importlib.util.find_spec("coverage") is None:
        raise UsageProblem("it needs coverage: pip install 'pytest-distcompat[reach]'.")
    return path


OPTION = Option(
    "reach",
    "FILE",
    "",
    _read_path,
    "Write which functions and branches of the installed stack the cells execute to this file, "
    "which `distcompat reach` shows. Needs pytest-distcompat[reach]; ranks take longer "
    "(default: none).",
)


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_options() -> list[Option]:
    """Add the option."""
    return [OPTION]


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_session(session: DistcompatSession) -> None:
    """Have ranks traced and the map written, if the option is given."""
    path: Path | None = session.setting("reach").value
    if path is None:
        return
    # What takes the place of real ranks, such as a simulation; None in most sessions.
    substitute = session.substitute
    if substitute is not None:
        raise pytest.UsageError(
            f"--distcompat-reach: a {substitute.name} executes no trainer; "
            f"expected no {substitute.option}"
        )
    from pytest_distcompat.ext.reach.session_map import SessionMap, TracedRanks

    session.config.pluginmanager.register(TracedRanks(), "distcompat-reach-ranks")
    if session.has_terminal:
        session.config.pluginmanager.register(SessionMap(session, path), "distcompat-reach-map")
