"""``configure``: writes the strategies as files for ``accelerate launch`` and DeepSpeed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the subcommand to the parser's."""
    configure = commands.add_parser(
        "configure",
        help="the strategies as files for accelerate and DeepSpeed",
        description="Write the accelerate YAML of each strategy in each precision, and the DeepSpeed JSON that it names.",
    )
    configure.add_argument("directory", type=Path, metavar="DIRECTORY")
    configure.add_argument(
        "--strategy", action="append", metavar="NAME", help="only this one; may be given several times"
    )
    configure.add_argument(
        "--precision", action="append", metavar="NAME", help="only this one; may be given several times"
    )
    configure.add_argument("--world-size", type=int, default=2, metavar="N", help="ranks (default: 2)")
    configure.add_argument(
        "--option", action="append", default=[], metavar="NAME", help="of the cell, as its id says it: state_dict_full"
    )
    configure.set_defaults(call=_configure)


def _configure(options: argparse.Namespace) -> int:
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.failures import UsageProblem
    from pytest_distcompat.precisions import PRECISIONS
    from pytest_distcompat.scripts.configuration import unsupported_reason, write_configuration
    from pytest_distcompat.strategies import STRATEGIES

    strategies = [STRATEGIES.get(name).name for name in options.strategy or STRATEGIES.names()]
    precisions = [PRECISIONS.get(name).name for name in options.precision or PRECISIONS.names()]
    ids = ["-".join((s, p, f"w{options.world_size}", *options.option)) for s in strategies for p in precisions]
    try:
        cells = [Cell.parse(name) for name in ids]
    except ValueError as error:
        raise UsageProblem(str(error)) from None
    try:
        for cell in cells:
            problem = unsupported_reason(cell)
            # A cell that has no such file is printed with the reason.
            print(f"{cell.id}: {problem}" if problem else write_configuration(cell, options.directory))  # noqa: T201 - a command speaks
    except OSError as error:
        raise UsageProblem(f"{error.filename or options.directory}: {error.strerror}") from None
    return 0
