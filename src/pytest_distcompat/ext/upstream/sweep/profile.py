"""The profile ``sweep``: every setting of the installed libraries, one at a time.

A profile decides which cells, configurations under test, a suite has in a session. With
``--distcompat-profile sweep`` the core calls ``PROFILE``, which an entry point names. ``_cells``
yields a cell for each value of each setting of the suite's driver, such as
``fsdp2-fp32-w2-model_mlp-set_AdamW.amsgrad=true``, in place of the suite's matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pytest_distcompat.cell import Cell, OptionValue
from pytest_distcompat.driver import Driver
from pytest_distcompat.ext.upstream.sweep import rules
from pytest_distcompat.profiles import AddedProfile, Selection


def _cells(selection: Selection) -> Iterator[Cell]:
    """Yield a cell for each value of each setting, under each strategy that can run it here.

    Args:
        selection: The suite's driver, strategies and number of ranks.
    """
    driver = selection.driver
    # The directory in which the processes of a session share what was read from the libraries.
    shared = None if selection.shared is None else selection.shared()
    # The sources of a driver are the objects of libraries that it makes. A setting is one of their
    # fields; ``setting.cells`` has a text for each value to try: ``AdamW.amsgrad=true``.
    for setting in rules.settings_of(rules.sources_of(driver), shared):
        for strategy, text in itertools.product(setting.strategies, setting.cells):
            if strategy not in selection.strategies:
                continue
            cell = Cell(strategy, setting.precision, selection.world_size)
            cell = with_set(driver, cell, text, **setting.options)
            # Whether the driver can run the cell on this machine.
            if selection.supported(cell):
                yield cell


def with_set(driver: type[Driver], cell: Cell, text: str, **options: OptionValue) -> Cell:
    """Return the cell with settings and options, of a small model if the driver has several.

    Args:
        driver: The driver of the cell.
        cell: A cell without options.
        text: Its settings, joined by ``+``: ``AdamW.amsgrad=true``.
        options: Its other options.
    """
    if "model" in driver.options:
        options.setdefault("model", "mlp")
    if "optimizer" not in driver.options:
        # Such a driver always makes the same optimizer, whose settings are swept.
        options.pop("optimizer", None)
    options["set"] = text
    return Cell.of(cell.strategy, cell.precision, cell.world_size, **options)


PROFILE = AddedProfile(
    "sweep",
    (
        "every setting of the installed libraries that the driver makes objects with, "
        "one at a time (distcompat settings)"
    ),
    _cells,
)
