"""The command ``distcompat``: the parser of its command line, and the call of the subcommand.

``main`` is the entry point of the script ``distcompat`` and of ``python -m pytest_distcompat.cli``.
A subcommand, as ``distcompat doctor``, is a module with a function ``add``, which adds a parser to
``commands`` (argparse's object for subcommands) and sets two defaults there: ``call``, a function
of the parsed arguments that returns the exit code, and perhaps ``finds_drivers``, true for
subcommands that import a trainer of the user's. Extensions add subcommands by entry points.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_distcompat import __version__
from pytest_distcompat.cli import doctor, reports, trace
from pytest_distcompat.disk import is_full
from pytest_distcompat.excerpt import visible
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.launch.process import do_nothing
from pytest_distcompat.registry import installed_entry_points

#: The group of entry points by which extensions add subcommands; each is a function like ``add``.
COMMANDS = "pytest_distcompat.commands"
#: The exit codes. ``OK``: nothing is wrong. ``NEWS``: news, problems or red sessions. ``USAGE``:
#: wrong arguments, as in argparse. ``INTERRUPTED``: Ctrl-C, as in shells.
OK, NEWS, USAGE, INTERRUPTED = 0, 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands, with those of extensions."""
    root = argparse.ArgumentParser("distcompat", description="pytest-distcompat without pytest.")
    root.add_argument("--version", action="store_true", help="print the version")
    root.set_defaults(call=None, finds_drivers=False)
    commands = root.add_subparsers(title="commands", metavar="COMMAND")
    for module in (doctor, trace, reports):
        module.add(commands)
    for entry in installed_entry_points().select(group=COMMANDS):
        add_command = entry.load()
        add_command(commands)
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand, and return the exit code; ``arguments`` are ``sys.argv`` by default.

    argparse itself ends the process for wrong arguments and for ``--help``.
    """
    root = parser()
    options = root.parse_args(arguments)
    if options.version:
        print(f"distcompat {__version__}")
        return OK
    if options.call is None:
        root.print_help()
        return OK
    if options.finds_drivers:
        # The working directory may have drivers. Other commands import nothing from there.
        directory = str(Path.cwd())
        if directory not in sys.path:
            sys.path.insert(0, directory)
    return _exit_code_of(options)


def _exit_code_of(options: argparse.Namespace) -> int:
    """Call the subcommand, and return the exit code.

    A mistake of the user's is printed to stderr, without a traceback.
    """
    try:
        with _ended_by_sigterm():
            return int(options.call(options))
    except UsageProblem as problem:
        _print_problem(str(problem))
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe: distcompat diff ... | head. Python would write to it once
        # more.
        sys.stderr.close()
        return NEWS
    except OSError as error:
        # A full disk is no bug of this program.
        if not is_full(error):
            raise
        place = f"{error.filename}: " if error.filename else ""
        _print_problem(f"{place}{error.strerror}")
        return NEWS


def _print_problem(problem: str) -> None:
    """Print a problem to stderr, with control characters escaped."""
    for line in f"distcompat: {problem}".split("\n"):
        print(visible(line), file=sys.stderr)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit in the block, so that ``finally`` clauses clean up."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        # The caller handles the signal, or another thread does.
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        # The command of a node agent sets another handler, which stays.
        if signal.getsignal(signal.SIGTERM) is _end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, *_: object) -> None:
    """Handle a signal: raise SystemExit with the exit code that shells have for it."""
    # Ignore further signals, which a scheduler sends while directories are being removed.
    signal.signal(number, do_nothing)
    raise SystemExit(128 + number)
