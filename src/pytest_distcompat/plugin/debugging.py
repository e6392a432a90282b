"""``--pdb`` for tests on ranks: the failed run runs again, and its rank stops where it failed.

A *rank* is a process of a torchrun process group. A distributed test fails on ranks that are gone
when pytest reports the failure; a debugger in pytest's process would show frames of this plugin. So
the failure is shown, and its *run* (the process group) is repeated by the ``torchrun`` command,
with an option by which one rank starts pdb at its exception.

With ``--pdb`` the hook ``pytest_runtestloop`` calls ``take_over``. Where an item fails on ranks,
``DistcompatSession.note_failed_run`` has put the ``FailedRun`` into the item's stash, pytest's
dictionary for the data of plugins.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

#: The name under which pytest registers its own plugin for ``--pdb``.
_NAME = "pdbinvoke"


class FailedRun(NamedTuple):
    """The run in which an item failed.

    Attributes:
        command: The command that repeats the run, as ``torchrun --standalone --nproc-per-node 2 -m
            pytest_distcompat.launch.rank .../request.json --by-hand``.
        rank: The rank that raised first; None if none did, as after a hang.
    """

    command: str
    rank: int | None


#: Where an item has the run in which it failed.
FAILED_RUN: pytest.StashKey[FailedRun] = pytest.StashKey()


def take_over(config: pytest.Config) -> None:
    """Replace pytest's plugin for ``--pdb`` by one that treats failures on ranks differently."""
    own = config.pluginmanager.unregister(name=_NAME)
    if own is not None:
        config.pluginmanager.register(Debugger(own), _NAME)


class Debugger:
    """Hooks of pytest's own plugin, for failures on ranks and, through it, for all others.

    A failure on ranks has no frame in this process that a user would want to see.
    """

    def __init__(self, own: Any) -> None:
        self._own = own
        #: The runs that were debugged. Several items of a suite may fail by one run, which is
        #: debugged once.
        self._seen: set[FailedRun] = set()

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Debug an error of pytest itself."""
        self._own.pytest_internalerror(excinfo)

    def pytest_exception_interact(self, node: Any, call: pytest.CallInfo[Any], report: Any) -> None:
        """Debug a failure: on ranks, if the item failed there."""
        failed = node.stash.get(FAILED_RUN, None) if call.when == "call" else None
        if failed is None:
            self._own.pytest_exception_interact(node, call, report)
            return
        if failed in self._seen:
            return
        self._seen.add(failed)
        capture = node.config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        terminal: Any = node.config.get_terminal_writer()
        terminal.line()
        terminal.sep(">", "traceback")
        report.toterminal(terminal)
        # As pytest's own does, so that the failure is not shown twice.
        report._pdbshown = True  # noqa: SLF001
        _debug(failed, terminal)


def _debug(failed: FailedRun, terminal: Any) -> None:
    """Repeat the run, with a debugger where its rank fails; or say how to do that.

    Args:
        failed: The run.
        terminal: pytest's terminal writer.
    """
    from pytest_distcompat.launch.rank import DEBUG_OPTION

    if failed.rank is None:
        terminal.sep(">", "no debugger")
        terminal.line(
            "No rank raised an exception at which a debugger could stop. To look into the run, put"
        )
        terminal.line(
            f"torch.distributed.breakpoint(rank=0) where it should stop, and run: {failed.command}"
        )
        return
    # The command of a run over several machines ends with a comment that says on which it starts.
    run, comment, node = failed.command.partition("  # ")
    reason = ""
    if node:
        reason = "The run is over several nodes. In a terminal of its node"
    elif not sys.__stdin__ or not sys.__stdin__.isatty():
        reason = "There is no terminal here. In one"
    if reason:
        terminal.sep(">", "no debugger")
        terminal.line(f"{reason}, rank {failed.rank} stops where it failed with:")
        repeated = f"{run} {DEBUG_OPTION} {failed.rank}"
        terminal.line(repeated + comment + node)
        return
    terminal.sep(
        ">", f"the run again: rank {failed.rank} stops where it fails (q goes on with the tests)"
    )
    # The module instead of the script ``torchrun``: it runs in the same Python as pytest.
    _, *arguments = shlex.split(failed.command)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *arguments,
        DEBUG_OPTION,
        str(failed.rank),
    ]
    subprocess.run(launch, check=False)
