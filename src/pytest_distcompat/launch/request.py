"""Requests to ranks: which function to call on each rank, with which settings.

A run is one process group from start to end. ``runner`` (for a ``CompatSuite``) and
``plugin/marked/run`` (for a test with ``@pytest.mark.distcompat``) make a ``Request`` for each run,
and give it to a launcher. The launcher writes it to ``request.json`` in the run's directory, and
each rank reads it there (``rank``). It is a file so that a user can start the same ranks by hand:
``torchrun --nproc-per-node 2 -m pytest_distcompat.launch.rank request.json --by-hand``.

A ``Warmth`` says what fork servers, the processes from which ranks are forked, import in advance.
The rest of the module starts interpreters as this one was started: with its flags, and with its
``sys.path``.
"""

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
        target: The function to call on each rank, as ``pytest_distcompat.worker:run``. Its
            arguments are ``payload`` and the rank's log (``rank_log.RankLog``).
        payload: Plain data for the function. For a suite these are the driver (the trainer under
            test), the cell (``fsdp2-bf16-w2``) and the actions (``build``, ``step``, ...); for a
            marked test its node id and pytest's options.
        world_size: The number of ranks.
        directory: Where the request, the ranks' logs and their output are written.
        timeout: The time limit in seconds.
        set: Environment variables to set on ranks. A forked rank has the environment of its fork
            server, which may be older than that of the process that sends the request.
        unset: Environment variables to unset for the same reason.
        cwd: The working directory.
        argv: The command line, as ``sys.argv``.
        import_path: The directories of ``sys.path``.
        collected: The test module whose tests the ranks run, collected beforehand: ``ANY_MODULE``
            for several modules, empty for none.
        turn: A number whose parity decides from which of the two fork servers rank 0 is forked. So
            the run that loads a checkpoint has other interpreters, with other hash seeds, than the
            run that saved it. None: the launcher takes turns.
        nodes: The number of machines over which the ranks are spread evenly (``Spread.nodes``).
        place: Which part of a run over several machines this machine has. Its keys are ``number``,
            from 0; ``rendezvous``, the function (``module:function``) by which torchrun's agent on
            this machine meets the others; and what that function needs. Empty if all ranks are on
            this machine.
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
        """Return the request with this process's command line, ``sys.path`` and working directory.

        A request that has them already keeps them: an agent passes on those of pytest's process.
        """
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
        """Write the request to its file, and return the path.

        The directory is created if it is missing.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.line, encoding="utf-8")
        return self.path

    @classmethod
    def read(cls, path: str | Path) -> Request:
        """Return the request in that file."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**fields)

    @functools.cached_property
    def line(self) -> str:
        """The request as a line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    def command(self, meeting: str = "--standalone") -> str:
        """Return the command line that performs this run alone, without pytest and fork servers.

        For example ``torchrun --standalone --nproc-per-node 2 -m pytest_distcompat.launch.rank
        run/request.json --by-hand``. Reports show it, so that a user can debug the run.

        Args:
            meeting: The options of torchrun that say how the agents of several machines meet.
        """
        words = ["torchrun", meeting, f"--nproc-per-node {self.spread.local_size}"]
        if len(interpreter()) > 1:
            # torchrun starts its ranks without the flags of its own Python.
            words.append(f"--no-python {shlex.join(unbuffered())}")
        path = shlex.quote(str(self.path))
        words.append(f"-m pytest_distcompat.launch.rank {path} --by-hand")
        return " ".join(words)


#: The value of ``Request.collected`` if ranks run tests of several modules.
ANY_MODULE = "*"


#: The flags of Python in one argument, as ``-Ou``, ``-Werror`` or ``-OX``: letters without a value,
#: then perhaps a letter with a value. The value is the rest of the argument, or the next argument.
_FLAGS = re.compile(r"-([^-\sWXmc]*)(?:([WXmc])(.*))?", re.DOTALL)


def interpreter() -> list[str]:
    """Return the command of this interpreter with its flags (``-W error``, ``-X dev``, ``-O``).

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
        # What follows is the program's: ``-m pytest tests``.
        if valued in {"m", "c"}:
            break
        if valued:
            command += [f"-{valued}", value or next(arguments, "")]
    return command


def in_new_process(function: str, *arguments: str) -> list[str]:
    """Return the command that calls a function of ``launch.server``, and dies with this process."""
    # The working directory is removed from ``sys.path`` first (see extend_import_path).
    # ``die_with_parent`` comes before other imports, because this process may die meanwhile.
    code = (
        "import sys; sys.path[:] = filter(None, sys.path); "
        "from pytest_distcompat.launch.process import die_with_parent; die_with_parent(); "
        f"from pytest_distcompat.launch.server import {function}; {function}(*sys.argv[1:])"
    )
    return [*interpreter(), "-c", code, *arguments]


def unbuffered() -> list[str]:
    """Return the interpreter's command with ``-u``, with which torchrun starts ranks."""
    command = interpreter()
    return command if "-u" in command else [*command, "-u"]


@dataclass(frozen=True)
class Warmth:
    """What fork servers do in advance, so that the ranks that they fork need not.

    Attributes:
        modules: The modules to import.
        call: A function that collects the user's tests, as ``module:function``; ranks inherit its
            result. Empty if no tests are collected in advance.
        payload: Plain data for the function.
        path: Entries of ``sys.path`` that pytest has added to the interpreter's own.
        own: Installed files that are the user's own code nevertheless: those of the project under
            test.
        timeout: The time limit for all this, in seconds.
    """

    modules: tuple[str, ...] = ()
    call: str = ""
    payload: Mapping[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    timeout: float = 600.0


def import_path() -> tuple[str, ...]:
    """Return the directories from which this process imports.

    pytest adds some to Python's own (rootdir, conftest.py, the ini key pythonpath). A ``Path``
    object in ``sys.path`` is left out, because Python ignores it.
    """
    return tuple(entry for entry in sys.path if entry and isinstance(entry, str))


def extend_import_path(entries: Sequence[str]) -> None:
    """Add directories to the end of ``sys.path``, and remove the working directory from it.

    Python puts the working directory there (as an empty text) in a process that was started with
    ``-c``. Then torch would import a ``cmd.py`` or ``profile.py`` of the user's instead of the
    standard library's.
    """
    # A dictionary, to have each directory once, in the order of the first mention.
    distinct = dict.fromkeys((*sys.path, *entries))
    sys.path[:] = [entry for entry in distinct if entry]


def set_import_path(entries: Sequence[str]) -> None:
    """Put these directories first on ``sys.path``, in this order; do nothing without any.

    They are those of the process that sent the request. So a module of the user's hides an
    installed one with the same name, as under torchrun. Directories that a library has added in
    this process come after them.
    """
    if entries:
        # Directories that ``entries`` has twice stay twice, as PYTHONPATH and a .pth file may
        # cause.
        own: list[str] = []
        for entry in dict.fromkeys(sys.path):
            if entry and entry not in entries:
                own.append(entry)
        sys.path[:] = [*entries, *own]
