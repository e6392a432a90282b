"""Parser of the command line, and the call of the subcommand."""

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

#: The entry points by which extensions add commands: functions of the parser's subparsers.
COMMANDS = "pytest_distcompat.commands"
#: The exit codes: nothing is wrong; news or problems; wrong arguments, as in pytest and argparse; a shell's after Ctrl-C.
OK, NEWS, USAGE, INTERRUPTED = 0, 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands; ``call`` of the parsed arguments is the subcommand's function."""
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
    return _exit_code_of(options)


def _exit_code_of(options: argparse.Namespace) -> int:
    """Call the subcommand; tell a problem in one line, where the fault is not this package's."""
    try:
        with _ended_by_sigterm():
            return int(options.call(options))
    except UsageProblem as problem:
        _tell(str(problem))
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe: distcompat diff ... | head
        sys.stderr.close()
        return NEWS
    except OSError as error:
        if not is_full(error):
            raise
        place = f"{error.filename}: " if error.filename else ""
        _tell(f"{place}{error.strerror}")
        return NEWS


def _tell(problem: str) -> None:
    lines = f"distcompat: {problem}".split("\n")
    print("\n".join(map(visible, lines)), file=sys.stderr)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM in the block end the process as an exception, so that processes are ended and directories removed."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        # Whoever calls this function handles it.
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        # The agent of a node has its own way to end.
        if signal.getsignal(signal.SIGTERM) is _end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, *_: object) -> None:
    # A scheduler repeats it, and directories are being removed then.
    signal.signal(number, do_nothing)
    raise SystemExit(128 + number)
