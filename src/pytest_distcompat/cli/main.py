"""Reads the command line and calls the subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pytest_distcompat.cli import configure, doctor, init, releases, reports, trace
from pytest_distcompat.excerpt import visible
from pytest_distcompat.failures import UsageProblem

#: The exit codes: nothing is wrong, or something is (news, problems); and what pytest and argparse say of wrong arguments.
OK, NEWS, USAGE = 0, 1, 2
#: What a shell says of Ctrl-C.
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """All subcommands; ``call`` of what it returns is the function of the one that was named."""
    made = argparse.ArgumentParser("distcompat", description="pytest-distcompat without pytest.")
    commands = made.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (doctor, init, trace, configure, reports, releases):
        module.add(commands)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0; 1 for news (``diff``), problems (``doctor``, ``trace``), red runs (``releases``); 2 for usage."""
    told = parser().parse_args(arguments)
    try:
        return int(told.call(told))
    except UsageProblem as problem:
        print("\n".join(map(visible, f"distcompat: {problem}".split("\n"))), file=sys.stderr)  # noqa: T201 - a command speaks
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Who reads the output has seen enough: distcompat diff ... | head
        sys.stderr.close()
        return NEWS
