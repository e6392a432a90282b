"""``settings``: lists each setting that the profile ``sweep`` tries, and says why the others are left out."""

from __future__ import annotations

import argparse
from typing import Any

from pytest_distcompat.cli.tables import table


def add(commands: Any) -> None:
    """Add the subcommand to the parser's."""
    parser = commands.add_parser(
        "settings",
        help="the settings of the installed libraries that the profile sweep tries",
        description="List the settings of the installed libraries. Exit code 1: one has neither values to try nor a rule.",
    )
    parser.add_argument(
        "--driver", action="append", metavar="NAME", help="only of this driver (default: all built-in ones)"
    )
    parser.set_defaults(call=_settings)


def _settings(options: argparse.Namespace) -> int:
    from pytest_distcompat.cli.drivers import named
    from pytest_distcompat.drivers import DRIVERS
    from pytest_distcompat.settings.rules import settings_of

    unknown = 0
    for name in options.driver or DRIVERS.names():
        found = settings_of(named(name).sources)
        rows = [(one.name, one.state, " ".join(one.values), one.reason) for one in found]
        counts = {
            state: sum(one.state == state for one in found) for state in ("swept", "hinted", "excluded", "unknown")
        }
        unknown += counts["unknown"]
        cells = sum(len(one.values) * len(one.strategies) for one in found)
        print("\n".join(table(("setting", "state", "values", "reason"), rows)))  # noqa: T201 - a command speaks
        counted = ", ".join(f"{number} {state}" for state, number in counts.items())
        print(f"{name}: {len(found)} settings, {counted}; {cells} cells")  # noqa: T201 - a command speaks
    return int(unknown > 0)
