"""Parser of the command line, and the call of the subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_distcompat import __version__
from pytest_distcompat.cli import doctor, init, nodes, releases, reports, settings, trace, walk
from pytest_distcompat.excerpt import visible
from pytest_distcompat.failures import UsageProblem

#: The exit codes: nothing is wrong; news or problems; wrong arguments, as in pytest and argparse; a shell's after Ctrl-C.
OK, NEWS, USAGE, INTERRUPTED = 0, 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands; ``call`` of the parsed arguments is the subcommand's function."""
    root = argparse.ArgumentParser("distcompat", description="pytest-distcompat without pytest.")
    root.add_argument("--version", action="store_true", help="print the version")
    root.set_defaults(call=None, finds_drivers=False)
    commands = root.add_subparsers(title="commands", metavar="COMMAND")
    for module in (doctor, init, nodes, trace, reports, releases, settings, walk):
        module.add(commands)
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand and return the exit code: 1 for news, problems and red sessions, 2 for wrong arguments, else 0."""
    root = parser()
    options = root.parse_args(arguments)
    if options.version:
        print(f"distcompat {__version__}")
        return OK
    if options.call is None:
        root.print_help()
        return OK
    # Drivers of the working directory are found too; other commands import nothing of it.
    if options.finds_drivers and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return int(options.call(options))
    except UsageProblem as problem:
        print("\n".join(map(visible, f"distcompat: {problem}".split("\n"))), file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe: distcompat diff ... | head
        sys.stderr.close()
        return NEWS
