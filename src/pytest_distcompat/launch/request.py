"""Requests to the ranks: files, because a process may be started by hand with one."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_distcompat.spread import Spread


@dataclass(frozen=True)
class Request:
    """One run: what to call on every rank, and where its files go.

    Attributes:
        target: ``module:function``, called with ``payload``, which is plain data, and the rank's log.
        directory: Where the request, the ranks' logs and their output are written.
        timeout: The time limit, in seconds.
        set: Environment variables that the rank needs set, to have the environment of the process that sends the request.
        unset: Environment variables that it needs unset for that.
        collected: The test module, collected beforehand, whose tests the ranks run: ``ANY_MODULE`` for several, empty for none.
        turn: Says by its parity from which of the warm interpreters rank 0 comes; runs that follow each other count it up.
        nodes: The machines over which the ranks are spread (``Spread.nodes``).
        place: Which part of the run this machine has: its ``number``, from 0, ``rendezvous``, the function (``module:function``)
            by which its agent meets the others, and what that function needs; empty where all ranks are here.
    """

    target: str
    payload: Mapping[str, Any]
    world_size: int
    directory: str
    timeout: float = 300.0
    set: Mapping[str, str] = field(default_factory=dict)
    unset: Sequence[str] = ()
    cwd: str = ""
    argv: Sequence[str] = ()
    import_path: Sequence[str] = ()
    collected: str = ""
    turn: int | None = None
    nodes: int = 1
    place: Mapping[str, Any] = field(default_factory=dict)

    @property
    def here(self) -> range:
        """The ranks that are started on this machine."""
        if not self.place:
            return range(self.world_size)
        return self.spread.ranks_on(self.place["number"])

    @property
    def spread(self) -> Spread:
        """How many ranks it has, and over how many machines they are spread."""
        return Spread(self.world_size, self.nodes)

    def from_here(self) -> Request:
        """Return the request with this process's command line, ``sys.path`` and working directory, where it has none."""
        # A request from another machine has those of the process that sent it.
        return dataclasses.replace(
            self,
            cwd=self.cwd or str(Path.cwd()),
            argv=self.argv or tuple(map(str, sys.argv)),
            import_path=self.import_path or import_path(),
        )

    @property
    def path(self) -> Path:
        """The file that holds this request."""
        return Path(self.directory) / "request.json"

    def write(self) -> Path:
        """Write the request to its file, and return the file. The directory is made if need be."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.line, encoding="utf-8")
        return self.path

    @classmethod
    def read(cls, path: str | Path) -> Request:
        """Return the request in that file."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))

    @functools.cached_property
    def line(self) -> str:
        """The request as a line of JSON; made once, for all ranks and the file."""
        return json.dumps(dataclasses.asdict(self))

    def command(self) -> str:
        """Return the command line that runs this one run alone, without pytest and without a fork server."""
        rank = f"-m pytest_distcompat.launch.rank {shlex.quote(str(self.path))} --by-hand"
        # torchrun starts its ranks without the flags of its own Python.
        python = f"--no-python {shlex.join(unbuffered())} " if len(interpreter()) > 1 else ""
        if not self.spread.on_one:
            where = f"--nnodes {self.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400"
            return f"torchrun {where} --nproc-per-node {self.spread.local_size} {python}{rank}  # on each node"
        return f"torchrun --standalone --nproc-per-node {self.world_size} {python}{rank}"


#: ``Request.collected``, if the ranks run tests of several modules.
ANY_MODULE = "*"


#: Flags of Python in one argument: letters without a value, then perhaps one with a value, the rest or the next argument.
_FLAGS = re.compile(r"-([^-\sWXmc]*)(?:([WXmc])(.*))?", re.DOTALL)


def interpreter() -> list[str]:
    """Return the command of this interpreter with the flags of its command line (``-W error``, ``-X dev``, ``-O``).

    Settings in the environment (``PYTHONWARNINGS``) are inherited anyway.
    https://docs.python.org/3/library/sys.html#sys.orig_argv
    """
    command = [sys.executable]
    arguments = iter(sys.orig_argv[1:])
    for argument in arguments:
        match = _FLAGS.fullmatch(argument)
        if match is None:
            break
        letters, valued, value = match.groups("")
        for letter in letters:
            # A rank must not stay at a prompt.
            if letter != "i":
                command.append(f"-{letter}")
        if valued in {"m", "c"}:
            break
        if valued:
            command += [f"-{valued}", value or next(arguments, "")]
    return command


def in_new_process(function: str, *arguments: str) -> list[str]:
    """Return the command that calls a function of ``server``, and dies with this process."""
    # Without the working directory (see extend_import_path), and first of all: this process may die while that one imports.
    code = (
        "import sys; sys.path[:] = filter(None, sys.path); "
        "from pytest_distcompat.launch.process import die_with_parent; die_with_parent(); "
        f"from pytest_distcompat.launch.server import {function}; {function}(*sys.argv[1:])"
    )
    return [*interpreter(), "-c", code, *arguments]


def unbuffered() -> list[str]:
    """Return the interpreter's command with the flag that torchrun itself starts ranks with."""
    command = interpreter()
    return command if "-u" in command else [*command, "-u"]


@dataclass(frozen=True)
class Warmth:
    """Work that the fork servers do beforehand: modules to import, and one call whose result ranks get.

    Attributes:
        modules: What is imported.
        call: The function that is called, as ``module:function``.
        payload: Plain data for the function.
        path: Entries of ``sys.path`` besides the interpreter's own: pytest finds modules in directories that it adds itself.
        own: Files that are installed and yet the user's own code.
        timeout: How long all that may take, in seconds.
    """

    modules: tuple[str, ...] = ()
    call: str = ""
    payload: Mapping[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    timeout: float = 600.0


def import_path() -> tuple[str, ...]:
    """Return the directories that this process imports from.

    pytest adds some to Python's own (rootdir, conftest.py, the ini key pythonpath). A ``Path``, as some conftest adds it, is left
    out: Python ignores it.
    """
    return tuple(entry for entry in sys.path if entry and isinstance(entry, str))


def extend_import_path(entries: Sequence[str]) -> None:
    """Import from these directories too, after those that this process imports from already.

    But not from the working directory, unless it is among them: Python puts it first in a process that was started with -c, and
    then torch would import a cmd.py or profile.py that lies there.
    """
    sys.path[:] = filter(None, dict.fromkeys((*sys.path, *entries)))


def set_import_path(entries: Sequence[str]) -> None:
    """Import from these directories in this order, as the process that sent them, then from what a library here has added.

    A module of the user's that has the name of an installed one is then found first, as under torchrun. Does nothing without
    entries.
    """
    if entries:
        # A directory that stands there twice, as PYTHONPATH and a .pth file may name it, does so on ranks too.
        own = [entry for entry in dict.fromkeys(sys.path) if entry and entry not in entries]
        sys.path[:] = [*entries, *own]
