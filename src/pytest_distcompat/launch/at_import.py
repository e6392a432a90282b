"""Find modules that a process must not import before it forks ranks.

A module with ``RANK = os.environ.get("RANK")`` at its top is an example: under torchrun, where each
rank imports the module itself, all ranks have another value, but ranks that are forked from a
process that has imported it share one. The same is true of a directory named after the clock, a
random number, a port that was free, or the offset of an open file. ``Watch`` finds such modules
while they are imported, so that the ranks of the tests concerned import them after the fork.
"""

from __future__ import annotations

import _random
import _socket
import builtins
import contextlib
import datetime as dt
import dis
import fnmatch
import functools
import importlib.machinery
import io
import os
import re
import site
import stat
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any, NamedTuple

from pytest_distcompat.launch import randomness
from pytest_distcompat.launch.environment import OF_THE_AGENT

#: Stands in place of a file for a finding that concerns every test.
EVERY_TEST = ""


@dataclass
class Findings:
    """What modules read or created at import.

    Attributes:
        found: First by the name of the environment variable that was read ("" for everything else),
            then by the file of the test module that the finding concerns (or ``EVERY_TEST``): the
            first such finding, as a sentence.
    """

    found: dict[str, dict[str, str]] = field(default_factory=lambda: {"": {}})

    def add(self, sentence: str, file: str, variable: str = "") -> None:
        """Add a finding, unless there is one on the same variable and file."""
        self.found.setdefault(variable, {}).setdefault(file, sentence)

    def reason(self, file: str | None, differs: Callable[[str], bool]) -> str:
        """Return why ranks must not share what was imported; empty if they may.

        Args:
            file: The test module whose tests the ranks run; None if it may be any.
            differs: Tells whether the ranks have another value of an environment variable than the
                process that imported the modules.
        """
        for variable, sentence_by_file in self.found.items():
            for concerned_file, sentence in sentence_by_file.items():
                concerned = file is None or concerned_file in {EVERY_TEST, file}
                if concerned and (not variable or differs(variable)):
                    return sentence
        return ""

    def join(self, other: Findings) -> None:
        """Add the findings of another process that imported the same modules."""
        for variable, sentence_by_file in other.found.items():
            # If both processes have a finding on the same file, that of this one stays.
            self.found[variable] = {**sentence_by_file, **self.found.get(variable, {})}


class _Importing(NamedTuple):
    """A module whose code runs, or a hook that calls functions of the user's.

    Attributes:
        name: The name of the module or hook.
        file: The module's file; empty for a hook.
        own: Whether it is the user's own code, not a library's.
        alone: Whether no code of others runs beside it, as it does during some hooks.
    """

    name: str
    file: str
    own: bool
    alone: bool = True

    @property
    def package(self) -> str:
        """The top-level package of the module."""
        return self.name.partition(".")[0]


#: The watch that is active in this process, so that plugins can add more to watch.
active: Watch | None = None


class Watch:
    """Finds, in a ``with`` block, what the user's own modules read or make while they are imported.

    The environment is watched by its class, files by ``open`` and by what stays open. Clocks,
    random numbers, sockets and processes are watched by a profile function, which is there only
    while the user's own code runs. Afterwards all is as it was. What compiled code reads by itself
    is not seen.

    Installed libraries may read the clock and the like: they do so wherever they are imported. But
    a library that reads which rank it is on, as Lightning does, counts. ``own`` are files of the
    user's own code that are installed too.
    """

    def __init__(self, own: Sequence[str] = ()) -> None:
        self.findings = Findings()
        #: The modules of libraries that were imported, in order.
        self._libraries: list[str] = []
        #: The packages among them that read which rank they are on, or import one that does.
        self._ranked: set[str] = set()
        self._own = set(map(os.path.realpath, own))
        self._importing: list[_Importing] = []
        self._seeded: set[int] = set()
        self._generators: Mapping[str, Any] = {}
        self._open: frozenset[tuple[int, str]] = frozenset()
        self._shared: frozenset[str] = frozenset()
        #: What is undone when the watch is over.
        self.undo = contextlib.ExitStack()

    def __enter__(self) -> Watch:  # noqa: PYI034 - Self is not in Python 3.10
        global active  # noqa: PLW0603 - a process has one
        active = self
        self._compare_state(report=False)
        self._shared = _shared_memory()
        for environ in (os.environ, os.environb):
            self.undo.callback(setattr, environ, "__class__", type(environ))
            _watch_environment(environ, self._variable_read, self._variable_written)
        for module in (builtins, io, os):
            self._watch_open(module)
        self.watch_loader(importlib.machinery.SourceFileLoader)
        self.undo.callback(sys.setprofile, sys.getprofile())
        return self

    def __exit__(self, *_: object) -> None:
        global active  # noqa: PLW0603 - a process has one
        active = None
        self.undo.close()
        for mapping in sorted(_shared_memory() - self._shared):
            self.findings.add(
                f"memory that processes share ({mapping}) is mapped at import", EVERY_TEST
            )

    @property
    def libraries(self) -> list[str]:
        """The imported modules of libraries that may be imported before ranks are forked.

        They are in order.
        """
        libraries: list[str] = []
        for name in self._libraries:
            package = name.partition(".")[0]
            if package not in self._ranked:
                libraries.append(name)
        return libraries

    def watch_loader(self, kind: type[Any], own: Sequence[str] = ()) -> None:
        """Watch the modules that loaders of this class execute.

        Files whose names match a pattern in ``own`` are the user's own code wherever they lie:
        tests may be installed too.
        """
        execute = kind.exec_module
        inherited = "exec_module" not in vars(kind)

        @functools.wraps(execute)
        def exec_module(loader: Any, module: Any) -> None:
            file = str(getattr(module, "__file__", None) or "")
            if any(fnmatch.fnmatch(Path(file).name, pattern) for pattern in own):
                self._own.add(os.path.realpath(file))
            importing = _Importing(module.__name__, os.path.realpath(file), self.is_own(file))
            with self._running(importing):
                execute(loader, module)

        kind.exec_module = exec_module
        if inherited:
            self.undo.callback(delattr, kind, "exec_module")
        else:
            self.undo.callback(setattr, kind, "exec_module", execute)

    def hook(self, name: str, *, alone: bool = False) -> contextlib.AbstractContextManager[None]:
        """Watch a hook that calls the user's functions: what they read concerns every test.

        If one such function runs ``alone``, what it draws and leaves open is found too.
        """
        return self._running(_Importing(name, "", own=True, alone=alone))

    def only_in(self, files: set[str]) -> None:
        """Make findings concern every test, but for those in these test modules.

        The latter concern only the tests of their module.

        A test module whose name occurs in another of the user's modules may be imported there: it
        concerns every test too.
        """
        alone = set()
        for file in files:
            real_file = os.path.realpath(file)
            if not self._is_named_elsewhere(real_file):
                alone.add(real_file)
        for sentence_by_file in self.findings.found.values():
            for file in list(sentence_by_file):
                if file not in alone:
                    sentence_by_file.setdefault(EVERY_TEST, sentence_by_file.pop(file))

    def is_own(self, file: str) -> bool:
        """Tell whether the file is the user's own code: no installed library, not this package."""
        if not file.endswith(".py") or file.startswith("<"):
            return False
        return os.path.realpath(file) in self._own or not _is_installed(file)

    @contextlib.contextmanager
    def _running(self, started: _Importing) -> Iterator[None]:
        """Watch the code of a module or hook while the block runs it."""
        importer = self._importing[-1] if self._importing else None
        if not started.own:
            self._libraries.append(started.name)
        # Between two libraries there is nothing to compare.
        boundary = started.own or importer is None or importer.own
        if boundary:
            self._compare_state(report=importer is not None and importer.own)
        self._importing.append(started)
        before = sys.getprofile()
        sys.setprofile(self._profile if started.own else None)
        try:
            yield
        finally:
            sys.setprofile(before)
            if boundary:
                self._compare_state(report=started.own)
            self._importing.pop()

    def _compare_state(self, *, report: bool) -> None:
        """Find files that code since the last call left open, and generators that it drew from."""
        files = _open_files()
        generators = randomness.states()
        # During a hook, code other than the user's runs too.
        if report and self._importing[-1].alone:
            importing_file = self._importing[-1].file
            for name, state in self._generators.items():
                if randomness.drawn(name, state, generators[name]):
                    self._add(f"draws random numbers of {name}", importing_file, "")
            for _, path in sorted(files - self._open):
                self._add(f"leaves {path} open", importing_file, "")
        self._open, self._generators = files, generators

    def _add(self, finding: str, file: str, location: str, variable: str = "") -> None:
        """Add a finding about the code that runs, at a ``location`` if that is known."""
        importing = self._importing[-1]
        phase = "at import" if importing.file else "while tests are collected"
        culprit = location or importing.file or importing.name
        self.findings.add(f"{culprit} {finding} {phase}", file, variable)

    def _add_if_own(
        self, finding: str, frame: FrameType | None, variable: str = "", *, everywhere: bool = False
    ) -> bool:
        """Add a finding if the user's own code caused it; return whether it did.

        With ``everywhere`` the finding concerns every test.
        """
        if not self._importing or not self._importing[-1].own:
            return False
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            if module.partition(".")[0] in _PASSED_OVER:
                return False
            path = frame.f_code.co_filename
            if self.is_own(path):
                concerned = EVERY_TEST
                if not everywhere and self._concerns_importing_only(path):
                    concerned = self._importing[-1].file
                self._add(finding, concerned, f"{path}:{frame.f_lineno}", variable)
                return True
            frame = frame.f_back
        return False

    def _concerns_importing_only(self, path: str) -> bool:
        """Tell whether only the module that is being imported can have stored what was read.

        Another module may store what its function read, and a module imported by a module may be
        imported elsewhere.
        """
        if os.path.realpath(path) != self._importing[-1].file:
            return False
        return not any(importer.own for importer in self._importing[:-1])

    def _profile(self, frame: FrameType, event: str, function: Any) -> None:
        """Add the finding about a C function that is about to be called; see ``sys.setprofile``."""
        if event != "c_call":
            return
        finding = self._read_by(function, frame)
        if finding:
            variable = _DECIDED_BY.get(finding, "")
            self._add_if_own(finding, frame, variable, everywhere=bool(variable))

    def _read_by(self, function: Any, frame: FrameType) -> str:
        """Return the finding about a C function that is called; empty if there is none."""
        instance = getattr(function, "__self__", None)
        if isinstance(instance, _random.Random):
            return self._random_number_drawn(function.__name__, instance, frame)
        if type(instance).__module__ == "torch._C" and type(instance).__name__ == "Generator":
            return self._torch_generator_called(function.__name__, instance)
        if isinstance(instance, _socket.socket):
            return "uses a socket"
        if isinstance(instance, type):
            reads_clock = function.__name__ in _CLOCK_METHODS and issubclass(instance, dt.date)
            return _READS_CLOCK if reads_clock else ""
        if not isinstance(function, BuiltinFunctionType):
            return ""
        return _READ_BY.get((function.__module__, function.__name__), "")

    def _random_number_drawn(self, name: str, generator: _random.Random, frame: FrameType) -> str:
        """Return the finding about a call of a generator's method; empty if it has a given seed."""
        if name == "seed":
            if frame.f_locals.get("a") is not None:
                self._seeded.add(id(generator))
            else:
                self._seeded.discard(id(generator))
        if name == "setstate" or id(generator) in self._seeded:
            return ""
        return _MAKES_RANDOM

    def _torch_generator_called(self, name: str, generator: Any) -> str:
        """Return the finding about a call of a torch generator's method.

        Numbers that are drawn are found otherwise: by the generator's state.
        """
        if name == "manual_seed":
            self._seeded.add(id(generator))
        if name == "seed":
            self._seeded.discard(id(generator))
            return _MAKES_RANDOM
        # The default generator has another seed in each process; any other has the same in all.
        is_default = generator is sys.modules["torch"].default_generator
        if not is_default or id(generator) in self._seeded:
            return ""
        if name in {"initial_seed", "get_state"}:
            return _MAKES_RANDOM
        return ""

    def _variable_read(self, name: str, frame: FrameType | None) -> None:
        """Add that the user's own code read a variable, or a library read which rank it is on."""
        by_default, frame = _environment_use(frame)
        if by_default and _is_discarded(frame):
            # Code that only makes sure that there is a value does not store it.
            return
        what = name or "the whole environment"
        if self._add_if_own(f"reads {what}", frame, variable=name) or not self._importing:
            return
        if OF_THE_AGENT.fullmatch(name) and not self._importing[-1].own:
            for importing in self._importing:
                if not importing.own:
                    self._ranked.add(importing.package)
            self._add(f"reads {name}", EVERY_TEST, "", variable=name)

    def _variable_written(self, name: str, frame: FrameType | None) -> None:
        """Add that a variable of the agent was set: on forked ranks it has another value."""
        by_default, frame = _environment_use(frame)
        if OF_THE_AGENT.fullmatch(name) and not by_default:
            self._add_if_own(f"sets {name}", frame, everywhere=True)

    def _watch_open(self, module: Any) -> None:
        """Find files that the user's own code opens with the ``open`` of this module."""
        ordinary = module.open

        @functools.wraps(ordinary)
        def watched(file: Any, *args: Any, **kwargs: Any) -> Any:
            if active is self and (_writes(args, kwargs) or str(file).startswith(_PROCESS_FILES)):
                self._add_if_own(f"opens {file!s:.200}, not only to read it,", _caller())
            return ordinary(file, *args, **kwargs)

        module.open = watched
        self.undo.callback(setattr, module, "open", ordinary)

    def _is_named_elsewhere(self, file: str) -> bool:
        """Tell whether the text of another loaded module of the user's has the name of this one."""
        stem = re.escape(Path(file).stem)
        name = re.compile(rf"\b{stem}\b")
        loaded_files: set[str] = set()
        for module in list(sys.modules.values()):
            loaded_file = getattr(module, "__file__", None)
            loaded_files.add(str(loaded_file or ""))
        for other in loaded_files:
            if not self.is_own(other) or os.path.realpath(other) == file:
                continue
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if name.search(Path(other).read_text(encoding="utf-8")):
                    return True
        return False


#: A callback for a variable of the environment: its name, empty where the whole environment is
#: read, and the frame.
_OnVariable = Callable[[str, "FrameType | None"], None]


def _watch_environment(environ: Any, read: _OnVariable, written: _OnVariable) -> None:
    """Have ``read`` called when a variable is read, and ``written`` when one is set or removed."""
    ordinary = type(environ)

    def watched(name: str, report: _OnVariable) -> Callable[..., Any]:
        method = getattr(ordinary, name)

        @functools.wraps(method)
        def call(environ: Any, *arguments: Any) -> Any:
            # The other methods are of the whole environment.
            of_one_variable = name.endswith(("item__", "contains__"))
            variable = os.fsdecode(arguments[0]) if of_one_variable else ""
            report(variable, _caller())
            result = method(environ, *arguments)
            if name == "__reduce_ex__":
                # Of ``copy``, whose copies outlive the class below.
                make, (_, *state), *more = result
                return make, (ordinary, *state), *more
            return result

        return call

    methods = {}
    for name in ("__getitem__", "__contains__", "__iter__", "__len__", "__repr__", "__reduce_ex__"):
        methods[name] = watched(name, read)
    for name in ("__setitem__", "__delitem__"):
        methods[name] = watched(name, written)
    environ.__class__ = type(ordinary.__name__, (ordinary,), methods)


class _EnvironmentUse(NamedTuple):
    """A call that reads or sets variables.

    Attributes:
        by_default: Whether ``setdefault`` was called.
        caller: The frame of the caller.
    """

    by_default: bool
    caller: FrameType | None


def _environment_use(frame: FrameType | None) -> _EnvironmentUse:
    """Return the call that a method of the environment is in, outside of the code of ``os``."""
    by_default = False
    while frame is not None and frame.f_globals.get("__name__") in {
        "os",
        "collections.abc",
        __name__,
    }:
        by_default = by_default or frame.f_code.co_name == "setdefault"
        frame = frame.f_back
    return _EnvironmentUse(by_default, frame)


def _is_discarded(frame: FrameType | None) -> bool:
    """Tell whether that frame discards the result of the call that it is in."""
    if frame is None:
        return False
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti and instruction.opname != "CACHE":
            return instruction.opname == "POP_TOP"
    raise AssertionError("a function ends with an instruction that returns")


def _caller() -> FrameType | None:
    """Return the frame that called the caller of this function."""
    return sys._getframe(2)  # noqa: SLF001 - documented, in spite of its name


_MAKES_RANDOM = "makes something random"
_READS_CLOCK = "reads the clock"
_ASKS_FOR_PID = "asks for the number of its process"
_OPENS_DATABASE = "opens a database"
_SETS_THREADS = "sets how many threads torch uses"
#: Functions of ``time`` that compute only from their arguments.
_WITHOUT_CLOCK = frozenset({"sleep", "mktime", "strptime", "asctime", "get_clock_info", "tzset"})
#: Functions of ``os`` that change files or processes.
_CHANGING = (
    "mkdir",
    "rmdir",
    "unlink",
    "remove",
    "rename",
    "replace",
    "link",
    "symlink",
    "truncate",
    "mkfifo",
    "mknod",
    "fork",
    "forkpty",
    "posix_spawn",
    "posix_spawnp",
    "system",
    "kill",
    "killpg",
)
#: By module and name of a C function, what it reads or changes.
_READ_BY: dict[tuple[str, str], str] = {
    ("posix", "times"): _READS_CLOCK,
    ("_uuid", "generate_time_safe"): _READS_CLOCK,
    ("posix", "getpid"): _ASKS_FOR_PID,
    ("posix", "getppid"): _ASKS_FOR_PID,
    ("_thread", "get_native_id"): _ASKS_FOR_PID,
    ("posix", "urandom"): _MAKES_RANDOM,
    ("posix", "getrandom"): _MAKES_RANDOM,
    ("_ssl", "RAND_bytes"): _MAKES_RANDOM,
    ("_ssl", "RAND_pseudo_bytes"): _MAKES_RANDOM,
    ("_posixsubprocess", "fork_exec"): "starts a process",
    ("sqlite3", "connect"): _OPENS_DATABASE,
    ("_sqlite3", "connect"): _OPENS_DATABASE,
    ("torch", "set_num_threads"): _SETS_THREADS,
}
for _name in dir(time):
    if _name not in _WITHOUT_CLOCK:
        _READ_BY["time", _name] = _READS_CLOCK
for _name in _CHANGING:
    _READ_BY["posix", _name] = f"calls os.{_name}"
#: A finding, and the variable by which ranks are set right after the fork. The finding matters only
#: where ranks have another value of it.
_DECIDED_BY = {_SETS_THREADS: "OMP_NUM_THREADS"}
_CLOCK_METHODS = frozenset({"now", "utcnow", "today"})
#: Modules that read the clock and write files for their own purposes, such as logging and import,
#: not for their callers.
_PASSED_OVER = {
    "importlib",
    "_frozen_importlib",
    "_frozen_importlib_external",
    "logging",
    "warnings",
}
_PASSED_OVER |= {"_pytest", "pytest", "pluggy", "hypothesis"}
#: How the paths of shared memory begin that no file keeps.
_UNKEPT_MEMORY = ("/dev/zero", "/dev/shm/", "/memfd:", "/SYSV")  # noqa: S108 - as there
#: Files that give each process other contents.
_PROCESS_FILES = ("/proc/self/", "/dev/random", "/dev/urandom")


def _writes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether these arguments of ``open`` or ``os.open`` ask for more than to read."""
    if args:
        mode = args[0]
    else:
        mode = kwargs.get("mode", kwargs.get("flags", "r"))
    if isinstance(mode, int):
        flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        return mode & flags != 0
    return not set("wax+").isdisjoint(str(mode))


def _open_files() -> frozenset[tuple[int, str]]:
    """Return this process's file descriptors, with the files that they lead to."""
    files = set()
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            if not stat.S_ISCHR(os.fstat(int(link.name)).st_mode):
                files.add((int(link.name), str(link.readlink())))
    return frozenset(files)


def _shared_memory() -> frozenset[str]:
    """Return the mappings of memory that forks share, while no file keeps what is written there.

    proc_pid_maps(5): each line has an address, permissions (``s`` is shared), an offset, a device,
    an inode and a path.
    """
    mappings = set()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if " rw-s " not in line:
            continue
        fields = line.split(maxsplit=5)
        address = fields[0]
        path = fields[5] if len(fields) > 5 else ""
        if path.startswith(_UNKEPT_MEMORY) or path.endswith(" (deleted)"):
            mappings.add(f"{path} at {address}")
    return frozenset(mappings)


@functools.cache
def _is_installed(file: str) -> bool:
    """Tell whether the file belongs to Python or to an installed library, wherever that is."""
    return os.path.realpath(file).startswith(_installed_in(tuple(sys.path)))


@functools.lru_cache(maxsize=4)
def _installed_in(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return how the paths of installed files begin, for an interpreter with that ``sys.path``."""
    directories = [
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    directories += [
        *site.getsitepackages(),
        site.getusersitepackages(),
        str(Path(__file__).parents[1]),
    ]
    prefixes = [f"{os.path.realpath(directory)}{os.sep}" for directory in directories]
    for entry in path:
        if not entry or f"{os.path.realpath(entry)}{os.sep}" in prefixes:
            continue
        # A directory of ``pip install --target`` has the descriptions of what was installed there
        # beside it. It may be the project's own directory, so that only what they list is
        # installed.
        for description in Path(entry).glob("*.dist-info"):
            prefixes += _listed(description)
    return tuple(prefixes)


def _listed(description: Path) -> Iterator[str]:
    """Yield how the paths begin that a distribution installed; its directory without a list.

    https://packaging.python.org/en/latest/specifications/recording-installed-packages/#the-record-file
    """
    directory = Path(os.path.realpath(description.parent))
    try:
        lines = (description / "RECORD").read_text(encoding="utf-8").splitlines()
    except OSError:
        yield f"{directory}{os.sep}"
        return
    tops = set()
    for line in lines:
        path = line.split(",")[0].strip('"')
        name, separator, _ = path.partition("/")
        tops.add((name, separator))
    for name, separator in tops:
        if name and name != "..":
            yield f"{directory / name}{os.sep if separator else ''}"
