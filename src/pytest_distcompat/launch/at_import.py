"""What code reads or makes at import that each rank of torchrun would read or make for itself.

Ranks that are forked from a process share what its modules got when they were imported. ``RANK = os.environ.get("RANK")`` is the
same on all of them, and so are a directory named after the clock, a random number, a port that was free, the offset of an
open file. Under torchrun each rank imports the modules itself. ``Watch`` finds such modules, so that the ranks of the tests
concerned can import them after the fork.
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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any, NamedTuple

from pytest_distcompat.launch import randomness
from pytest_distcompat.launch.environment import OF_THE_AGENT

#: In place of a file: a finding that concerns every test.
EVERY_TEST = ""


@dataclass
class Findings:
    """What was read or made at import.

    Attributes:
        made: The first thing found, as one sentence, by the file of the test module that it concerns, or ``EVERY_TEST``.
        reads: The same for each environment variable that was read, by its name.
    """

    made: dict[str, str] = field(default_factory=dict)
    reads: dict[str, dict[str, str]] = field(default_factory=dict)

    def reason(self, file: str | None, differs: Callable[[str], bool]) -> str:
        """Return why ranks must not share what was imported, as one sentence; empty if they may.

        Args:
            file: The test module that the ranks run; None if they may run any.
            differs: Whether ranks have another value of an environment variable than the process that imported.
        """
        read = [places for name, places in self.reads.items() if differs(name)]
        for places in (self.made, *read):
            for place, sentence in places.items():
                if file is None or place in {EVERY_TEST, file}:
                    return sentence
        return ""

    def join(self, other: Findings) -> None:
        """Add what another process found that imported the same."""
        self.made = other.made | self.made
        for name, places in other.reads.items():
            self.reads[name] = places | self.reads.get(name, {})


class _Importing(NamedTuple):
    """A module whose code runs, or a hook, which has no file; ``alone`` where no code of others runs beside it."""

    name: str
    file: str
    own: bool
    alone: bool = True


#: The watch that is on in this process, for whoever knows of more to watch.
active: Watch | None = None


class Watch:
    """Finds, in a ``with`` block, what the user's own modules read or make while they are imported.

    The environment is watched by its class, files by ``open`` and by what stays open. Clocks, random numbers, sockets and
    processes are watched by a profile function, which is there only while the user's own code runs. Afterwards all is as it was.
    What compiled code reads by itself is not seen.

    Installed libraries may read the clock and the like: they do so wherever they are imported. Where one reads which rank it is
    on, as Lightning does, that counts.

    Args:
        own: Files that are the user's own code although they are installed.
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
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Watch:  # noqa: PYI034 - Self is not in Python 3.10
        global active  # noqa: PLW0603 - a process has one
        active = self
        self._compare(report=False)
        self._shared = _shared_memory()
        self._undo.enter_context(environment_read(self._variable_read, self._variable_written))
        for module in (builtins, io, os):
            self._watch_open(module)
        self.watch_loader(importlib.machinery.SourceFileLoader)
        self._undo.callback(sys.setprofile, sys.getprofile())
        return self

    def __exit__(self, *_: object) -> None:
        global active  # noqa: PLW0603 - a process has one
        active = None
        self._undo.close()
        for one in sorted(_shared_memory() - self._shared):
            self.findings.made.setdefault(EVERY_TEST, f"memory that processes share ({one}) is mapped at import")

    @property
    def libraries(self) -> list[str]:
        """The modules of libraries that were imported and that any process may import for ranks, in order."""
        return [name for name in self._libraries if name.partition(".")[0] not in self._ranked]

    def watch_loader(self, kind: type[Any], own: Sequence[str] = ()) -> None:
        """Watch the modules that loaders of this class execute.

        Args:
            kind: The class.
            own: Patterns of the names of files that are the user's own code wherever they lie: tests may be installed too.
        """
        execute, inherited = kind.exec_module, "exec_module" not in vars(kind)

        @functools.wraps(execute)
        def exec_module(loader: Any, module: Any) -> None:
            file = str(getattr(module, "__file__", None) or "")
            if any(fnmatch.fnmatch(Path(file).name, pattern) for pattern in own):
                self._own.add(os.path.realpath(file))
            with self._running(_Importing(module.__name__, os.path.realpath(file), self.is_own(file))):
                execute(loader, module)

        kind.exec_module = exec_module
        if inherited:
            self._undo.callback(delattr, kind, "exec_module")
        else:
            self._undo.callback(setattr, kind, "exec_module", execute)

    def hook(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Watch a hook that functions of the user's own are called by, beside others. What they read concerns every test."""
        return self._running(_Importing(name, "", own=True, alone=False))

    def function(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Watch one such function alone: what it draws and leaves open is found too."""
        return self._running(_Importing(name, "", own=True))

    def at_end(self, undo: Callable[[], object]) -> None:
        """Call that when the watch is over."""
        self._undo.callback(undo)

    def only_in(self, files: set[str]) -> None:
        """Have findings concern every test, but for those in these test modules, which concern themselves.

        A test module whose name stands in another module of the user's may be imported there: it concerns every test too.
        """
        alone = {file for file in map(os.path.realpath, files) if not self._is_named_elsewhere(file)}
        for places in (self.findings.made, *self.findings.reads.values()):
            for file in [file for file in places if file not in alone]:
                places.setdefault(EVERY_TEST, places.pop(file))

    def is_own(self, file: str) -> bool:
        """Return whether that is a file of the user's own code, not of an installed library or of this package."""
        if not file.endswith(".py") or file.startswith("<"):
            return False
        return os.path.realpath(file) in self._own or not _is_installed(file)

    @contextlib.contextmanager
    def _running(self, what: _Importing) -> Iterator[None]:
        outer = self._importing[-1] if self._importing else None
        if not what.own:
            self._libraries.append(what.name)
        # Between two libraries nothing is to be told apart.
        boundary = what.own or outer is None or outer.own
        if boundary:
            self._compare(report=outer is not None and outer.own)
        self._importing.append(what)
        before = sys.getprofile()
        sys.setprofile(self._profile if what.own else None)
        try:
            yield
        finally:
            sys.setprofile(before)
            if boundary:
                self._compare(report=what.own)
            self._importing.pop()

    def _compare(self, *, report: bool) -> None:
        """Find what the code that ran since the last time left open, and from which generators it drew."""
        files, generators = _open_files(), randomness.states()
        known = self._generators
        if report and self._importing[-1].alone:
            drawn = [name for name in known if randomness.drawn(name, known[name], generators[name])]
            left = [path for _, path in sorted(files - self._open)]
            for what in [
                *(f"draws random numbers of {name}" for name in drawn),
                *(f"leaves {one} open" for one in left),
            ]:
                self._add(what, self._importing[-1].file, "")
        self._open, self._generators = files, generators

    def _add(self, what: str, file: str, where: str, variable: str = "") -> None:
        now = self._importing[-1]
        sentence = f"{where or now.file or now.name} {what} {'at import' if now.file else 'while tests are collected'}"
        places = self.findings.reads.setdefault(variable, {}) if variable else self.findings.made
        places.setdefault(file, sentence)

    def _found(self, what: str, frame: FrameType | None, variable: str = "", *, everywhere: bool = False) -> bool:
        """Add what was read from that frame, if the user's own code did it; ``everywhere``: it concerns every test."""
        if not self._importing or not self._importing[-1].own:
            return False
        now = self._importing[-1]
        while frame is not None:
            module, path = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
            if module.partition(".")[0] in _PASSING:
                return False
            if self.is_own(path):
                # What a function of another module read may be kept there, and what a module of a module's is not its alone.
                alone = os.path.realpath(path) == now.file and not any(one.own for one in self._importing[:-1])
                alone = alone and not everywhere
                self._add(what, now.file if alone else EVERY_TEST, f"{path}:{frame.f_lineno}", variable)
                return True
            frame = frame.f_back
        return False

    def _profile(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and (what := self._read_by(function, frame)):
            variable = _DECIDED_BY.get(what, "")
            self._found(what, frame, variable, everywhere=bool(variable))

    def _read_by(self, function: Any, frame: FrameType) -> str:
        """Return what a function in C that is about to be called reads or changes; empty for what is the same everywhere."""
        instance = getattr(function, "__self__", None)
        if isinstance(instance, _random.Random):
            return self._drawn(function.__name__, instance, frame)
        if type(instance).__module__ == "torch._C" and type(instance).__name__ == "Generator":
            return self._asked(function.__name__, instance)
        if isinstance(instance, _socket.socket):
            return "uses a socket"
        if isinstance(instance, type):
            return "reads the clock" if function.__name__ in _NOW and issubclass(instance, dt.date) else ""
        if not isinstance(function, BuiltinFunctionType):
            return ""
        return _READ_BY.get(function) or _READ_BY_NAME.get((function.__module__, function.__name__), "")

    def _drawn(self, name: str, generator: _random.Random, frame: FrameType) -> str:
        """A generator that was given a seed draws the same on every rank."""
        if name == "seed" and frame.f_locals.get("a") is not None:
            self._seeded.add(id(generator))
            return ""
        if name == "seed":
            self._seeded.discard(id(generator))
        return "" if id(generator) in self._seeded or name == "setstate" else _RANDOM

    def _asked(self, name: str, generator: Any) -> str:
        """Return what a method of a generator of torch's tells; what is drawn from it is found by its state."""
        if name == "manual_seed":
            self._seeded.add(id(generator))
        if name == "seed":
            self._seeded.discard(id(generator))
            return _RANDOM
        # Each process has another seed in this one, and all have the same in any other.
        default = generator is sys.modules["torch"].default_generator
        return (
            _RANDOM if default and name in {"initial_seed", "get_state"} and id(generator) not in self._seeded else ""
        )

    def _variable_read(self, name: str, frame: FrameType | None) -> None:
        while frame is not None and frame.f_globals.get("__name__") in _OF_THE_ENVIRONMENT:
            if frame.f_code.co_name == "setdefault" and _is_discarded(frame.f_back):
                # Who only sees to it that there is a value keeps none.
                return
            frame = frame.f_back
        if self._found(f"reads {name or 'the whole environment'}", frame, variable=name) or not self._importing:
            return
        now = self._importing[-1]
        if OF_THE_AGENT.fullmatch(name) and not now.own:
            self._ranked |= {one.name.partition(".")[0] for one in self._importing if not one.own}
            self._add(f"reads {name}", EVERY_TEST, "", variable=name)

    def _variable_written(self, name: str, frame: FrameType | None) -> None:
        """Add that a variable of the agent's was set: the agent's value overrides it on ranks that are forked afterwards."""
        by_default = False
        while frame is not None and frame.f_globals.get("__name__") in _OF_THE_ENVIRONMENT:
            by_default = by_default or frame.f_code.co_name == "setdefault"
            frame = frame.f_back
        if OF_THE_AGENT.fullmatch(name) and not by_default:
            self._found(f"sets {name}", frame, everywhere=True)

    def _watch_open(self, module: Any) -> None:
        ordinary = module.open

        @functools.wraps(ordinary)
        def watched(file: Any, *args: Any, **kwargs: Any) -> Any:
            if active is self and (_writes(args, kwargs) or str(file).startswith(_OF_THE_PROCESS)):
                self._found(f"opens {file!s:.200}, not only to read it,", _caller())
            return ordinary(file, *args, **kwargs)

        module.open = watched
        self._undo.callback(setattr, module, "open", ordinary)

    def _is_named_elsewhere(self, file: str) -> bool:
        word = re.compile(rf"\b{re.escape(Path(file).stem)}\b")
        others = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
        for other in filter(self.is_own, others):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if os.path.realpath(other) != file and word.search(Path(other).read_text(encoding="utf-8")):
                    return True
        return False


#: What is told of a variable of the environment: its name, empty where the whole environment is read, and the frame.
_Tell = Callable[[str, "FrameType | None"], None]


@contextlib.contextmanager
def environment_read(read: _Tell, written: _Tell = lambda _, __: None) -> Iterator[None]:
    """Call ``read`` for each variable of the environment that the block reads, ``written`` for each that it sets or removes."""
    with contextlib.ExitStack() as undo:
        for environ in (os.environ, os.environb):
            _watch_environment(environ, read, written)
            undo.callback(setattr, environ, "__class__", type(environ).__base__)
        yield


def _watch_environment(environ: Any, read: _Tell, written: _Tell) -> None:
    ordinary = type(environ)

    class Watched(ordinary):  # type: ignore[misc, valid-type]  # os.environ's own class
        def __getitem__(self, key: Any) -> Any:
            read(os.fsdecode(key), _caller())
            return super().__getitem__(key)

        def __contains__(self, key: Any) -> bool:
            read(os.fsdecode(key), _caller())
            return bool(super().__contains__(key))

        def __iter__(self) -> Iterator[Any]:
            read("", _caller())
            return iter(super().__iter__())

        def __len__(self) -> int:
            read("", _caller())
            return len(self._data)

        def __repr__(self) -> str:
            read("", _caller())
            return str(super().__repr__())

        def __reduce_ex__(self, protocol: Any) -> Any:
            # Of ``copy``, whose copies outlive this class.
            read("", _caller())
            make, (_, *arguments), *more = super().__reduce_ex__(protocol)
            return make, (ordinary, *arguments), *more

        def __setitem__(self, key: Any, value: Any) -> None:
            written(os.fsdecode(key), _caller())
            super().__setitem__(key, value)

        def __delitem__(self, key: Any) -> None:
            written(os.fsdecode(key), _caller())
            super().__delitem__(key)

    Watched.__name__ = Watched.__qualname__ = ordinary.__name__
    environ.__class__ = Watched


#: Modules whose functions read the environment for whoever calls them.
_OF_THE_ENVIRONMENT = frozenset({"os", "collections.abc", __name__})


def _is_discarded(frame: FrameType | None) -> bool:
    """Return whether that frame throws away what the call that it is in returns."""
    if frame is None:
        return False
    after = (one for one in dis.get_instructions(frame.f_code) if one.offset > frame.f_lasti and one.opname != "CACHE")
    return next(after).opname == "POP_TOP"


def _caller() -> FrameType | None:
    """The frame of whoever called the function that asks."""
    return sys._getframe(2)  # noqa: SLF001 - documented, in spite of its name


_RANDOM = "makes something random"
#: Functions of ``time`` that are given all that they need.
_NO_CLOCK = frozenset({"sleep", "mktime", "strptime", "asctime", "get_clock_info", "tzset"})
#: What a function in C reads or changes.
_READ_BY: dict[Any, str] = {
    **{
        function: "reads the clock"
        for name, function in vars(time).items()
        if isinstance(function, BuiltinFunctionType) and name not in _NO_CLOCK
    },
    os.times: "reads the clock",
    **dict.fromkeys((os.getpid, os.getppid, threading.get_native_id), "asks for the number of its process"),
    **dict.fromkeys((os.urandom, os.getrandom), _RANDOM),
    **{
        function: f"calls os.{name}"
        for name in (
            *(
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
            ),
            *("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "kill", "killpg"),
        )
        if (function := getattr(os, name, None)) is not None
    },
}
with contextlib.suppress(ImportError):
    import _posixsubprocess

    _READ_BY[_posixsubprocess.fork_exec] = "starts a process"
with contextlib.suppress(ImportError):
    import _uuid  # type: ignore[import-not-found]  # typeshed has it not

    _READ_BY[_uuid.generate_time_safe] = "reads the clock"
#: The same of modules that are not to be imported for it.
_READ_BY_NAME = {
    **dict.fromkeys((("_ssl", name) for name in ("RAND_bytes", "RAND_pseudo_bytes")), _RANDOM),
    **dict.fromkeys(((module, "connect") for module in ("sqlite3", "_sqlite3")), "opens a database"),
}
_THREADS = "sets how many threads torch uses"
_READ_BY_NAME["torch", "set_num_threads"] = _THREADS
#: What matters only where ranks have another value of a variable, by which they are brought to it after the fork.
_DECIDED_BY = {_THREADS: "OMP_NUM_THREADS"}
_NOW = frozenset({"now", "utcnow", "today"})
#: Modules that read the clock and write files for what they tell or import, not for who calls them.
_PASSING = frozenset({"importlib", "_frozen_importlib", "_frozen_importlib_external", "logging", "warnings"}) | {
    "_pytest",
    "pytest",
    "pluggy",
    "hypothesis",
}
#: Files that each process reads something else from.
_OF_THE_PROCESS = ("/proc/self/", "/dev/random", "/dev/urandom")


def _writes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether these arguments of ``open`` or ``os.open`` ask for more than to read."""
    mode = args[0] if args else kwargs.get("mode", kwargs.get("flags", "r"))
    if isinstance(mode, int):
        return bool(mode & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return bool(set(str(mode)) & set("wax+"))


def _open_files() -> frozenset[tuple[int, str]]:
    """The file descriptors that this process has, with what they lead to."""
    found = set()
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            if not stat.S_ISCHR(os.fstat(int(link.name)).st_mode):
                found.add((int(link.name), str(link.readlink())))
    return frozenset(found)


def _shared_memory() -> frozenset[str]:
    """The mappings of memory that a fork would share and other processes would not: no file keeps what is written there."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    found = (line.split(maxsplit=5) for line in lines if " rw-s " in line)
    names = {(where, path) for where, _, _, _, _, *rest in found for path in ("".join(rest),)}
    return frozenset(
        f"{path} at {where}"
        for where, path in names
        if path.startswith(("/dev/zero", "/dev/shm/", "/memfd:", "/SYSV")) or path.endswith(" (deleted)")  # noqa: S108 - as there
    )


@functools.cache
def _is_installed(file: str) -> bool:
    """Return whether that file is of an installed library: of Python's own, a site's, the user's, of ``pip --target``."""
    return os.path.realpath(file).startswith(_installed_in(tuple(sys.path)))


@functools.lru_cache(maxsize=4)
def _installed_in(path: tuple[str, ...]) -> tuple[str, ...]:
    known = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    everywhere = (*known, *site.getsitepackages(), site.getusersitepackages(), Path(__file__).parents[1])
    found = [f"{os.path.realpath(str(one))}{os.sep}" for one in everywhere]
    for entry in map(Path, filter(None, path)):
        if f"{os.path.realpath(entry)}{os.sep}" in found:
            continue
        # A directory of ``pip install --target`` has the descriptions of what was installed there beside it. It may be the
        # project's own directory, so that only what they list is installed.
        for description in entry.glob("*.dist-info"):
            found += _listed(description)
    return tuple(found)


def _listed(description: Path) -> Iterator[str]:
    """What a distribution has installed beside its description, packages with a separator behind them; without a list, all.

    https://packaging.python.org/en/latest/specifications/recording-installed-packages/#the-record-file
    """
    place = Path(os.path.realpath(description.parent))
    try:
        lines = (description / "RECORD").read_text(encoding="utf-8").splitlines()
    except OSError:
        yield f"{place}{os.sep}"
        return
    for name, inside in {line.split(",")[0].strip('"').partition("/")[:2] for line in lines}:
        if name and name != "..":
            yield f"{place / name}{os.sep if inside else ''}"
