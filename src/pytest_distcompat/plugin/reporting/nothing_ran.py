"""What to tell the user of a session in which no cell ran: why, and what to install.

A suite is a subclass of ``CompatSuite``. Its *cells* are configurations such as ``ddp-fp32-w2``:
strategy, precision, 2 ranks. If all of them were skipped, nothing was checked, and ``Results``
fails the session and shows these lines at its end::

    no cell ran, so nothing was checked; expected at least one verdict
      TestMyTrainer ddp-fp32-w2, TestMyTrainer fsdp2-fp32-w2: accelerate is not installed
      install it: pip install accelerate
      --distcompat-nothing-ran=pass lets such a session pass
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pytest_distcompat.installed import GET_TORCH
from pytest_distcompat.status import Verdict

#: The package that a reason for skipping a cell names as missing.
_NOT_INSTALLED = re.compile(r"\b([\w.-]+) is not installed")


def nothing_ran_lines(skipped: Iterable[Verdict], without_cells: Mapping[str, str]) -> list[str]:
    """Return the lines that say why no cell ran, and what to install.

    Args:
        skipped: The verdicts of the session, all of which are skips.
        without_cells: Why suites have no selected cell. Such a suite has one item, which is skipped
            with the reason: ``{"tests/test_a.py::TestMyTrainer::test[no-cell]": reason}``.
    """
    lines = ["no cell ran, so nothing was checked; expected at least one verdict"]
    # A dictionary, to have each package once and in order.
    missing: dict[str, None] = {}
    for reason, places in _places_by_reason(skipped, without_cells).items():
        places_text = ", ".join(places)
        lines.append(f"  {places_text}: {reason}")
        for package in _NOT_INSTALLED.findall(reason):
            missing[package] = None
    if "torch" in missing:
        # Only torch is named, even if other packages are missing: they need torch, and with them
        # pip would install its build for CUDA.
        lines.append(f"  install it: {GET_TORCH}")
    elif missing:
        lines.append(f"  install it: pip install {' '.join(missing)}")
    lines.append("  --distcompat-nothing-ran=pass lets such a session pass")
    return lines


def _places_by_reason(
    skipped: Iterable[Verdict], without_cells: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return, for each reason, the suites and cells with it: reason -> places, each place once.

    Example: ``{"torch is not installed": ["TestMyTrainer ddp-fp32-w2"]}``. A suite without selected
    cells stands by its name alone.
    """
    places: dict[str, list[str]] = {}

    def add(reason: str, place: str) -> None:
        of_reason = places.setdefault(reason, [])
        if place not in of_reason:
            of_reason.append(place)

    for result in skipped:
        reason = result.reason or result.message
        add(reason, place=f"{result.suite} {result.cell}")
    for nodeid, reason in without_cells.items():
        # The class in ``tests/test_a.py::TestMyTrainer::test[no-cell]``.
        add(reason, place=nodeid.split("::")[-2])
    return places
