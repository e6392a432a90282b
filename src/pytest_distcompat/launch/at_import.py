"""Find modules that a process must not import before it forks ranks.

A module with ``RANK = os.environ.get("RANK")`` at its top is an example. Under torchrun each rank
imports the module itself, and each has its own value. Ranks that are forked from a process which
has imported the module all have the same value. The same goes for a directory named after the
clock, a random number, a free port, or the offset of an open file.

A fork server is a process that imports modules and collects the tests in advance, and from which
ranks are forked then. ``preload.collect`` runs in it, and collects the tests inside of
``with Watch()``. The ``Findings`` go to pytest's process (``launcher_process``), which asks before
each run for their ``reason``: with one, ranks are forked from a process without the user's modules,
and import these themselves.

For example, a test module ``test_a.py`` with the line above gives the finding ``test_a.py:3 reads
RANK at import``, which concerns the tests of ``test_a.py``. The same line in ``conftest.py`` would
concern every test.
"""

from __future__ import annotations

import _random
import _socket
import builtins
import contextlib
import datetime as dt
import fnmatch
import functools
import importlib.machinery
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any, NamedTuple

from pytest_distcompat.launch import randomness
from pytest_distcompat.launch.differing_calls import (
    CLOCK_METHODS,
    FINDING_BY_FUNCTION,
    MAKES_RANDOM,
    READS_CLOCK,
    VARIABLE_BY_FINDING,
)
from pytest_distcompat.launch.environment import OF_THE_AGENT
from pytest_distcompat.launch.environment_watch import (
    caller,
    environment_use,
    is_discarded,
    watch_environment,
)
from pytest_distcompat.launch.import_findings import EVERY_TEST, Findings
from pytest_distcompat.launch.installed_files import is_installed
from pytest_distcompat.launch.open_files import open_files, shared_memory


class _Importing(NamedTuple):
    """A module whose code runs, or a hook that calls functions of the user's.

    Attributes:
        name: The name of the module or hook.
        file: The module's file; empty for a hook.
        own: Whether it is the user's own code, not a library's.
        alone: Whether only its own code runs meanwhile. During the hook
            ``pytest_collection_modifyitems``, say, other plugins run too, and an open file may be
            theirs.
    """

    name: str
    file: str
    own: bool
    alone: bool = True

    @property
    def package(self) -> str:
        """The top-level package of the module."""
        return self.name.partition(".")[0]


#: The watch that is active in this process. While pytest collects, ``rank_session`` adds pytest's
#: loader of test modules and the user's hooks to it.
active: Watch | None = None


class Watch:
    """Finds, in a ``with`` block, what the user's own modules read or make while they are imported.

    Four means are used while the block runs, and undone after it:

    - ``os.environ`` gets a class that reports each access (``environment_watch``).
    - ``open`` is replaced, and the open files are compared before and after each module.
    - The states of the random number generators are compared in the same way.
    - A profile function (``sys.setprofile``) sees each call of a C function, as ``time.time`` or a
      socket's method. It is set only while the user's own code runs, because it is slow.

    What compiled code reads by itself is not seen.

    Installed libraries may read the clock and the like: they do so wherever they are imported. But
    a library that reads which rank it is on, as Lightning does, counts.

    Args:
        own: Paths of files that are the user's own code although they are installed, as the modules
            of the project under test.
    """

    def __init__(self, own: Sequence[str] = ()) -> None:
        self.findings = Findings()
        #: The modules of libraries that were imported, in order.
        self._libraries: list[str] = []
        #: The packages among them that read which rank they are on, or import one that does.
        self._ranked: set[str] = set()
        #: The files of the argument ``own``, and those that ``watch_loader`` adds.
        self._own = set(map(os.path.realpath, own))
        #: The modules and hooks whose code runs, the innermost last.
        self._importing: list[_Importing] = []
        #: The generators, by ``id``, that have a given seed: they draw the same in each process.
        self._seeded: set[int] = set()
        #: The states of the global generators at the last comparison, by name.
        self._generators: Mapping[str, Any] = {}
        #: The open files at the last comparison, as (descriptor, path).
        self._open: frozenset[tuple[int, str]] = frozenset()
        #: The shared mappings of memory when the block began, as text.
        self._shared: frozenset[str] = frozenset()
        #: What is undone when the watch is over. Others may add to it.
        self.undo = contextlib.ExitStack()

    def __enter__(self) -> Watch:  # noqa: PYI034 - Self is not in Python 3.10
        global active  # noqa: PLW0603 - a process has one
        active = self
        self._compare_state(report=False)
        self._shared = shared_memory()
        for environ in (os.environ, os.environb):
            self.undo.callback(setattr, environ, "__class__", type(environ))
            watch_environment(environ, self._variable_read, self._variable_written)
        for module in (builtins, io, os):
            self._watch_open(module)
        self.watch_loader(importlib.machinery.SourceFileLoader)
        self.undo.callback(sys.setprofile, sys.getprofile())
        return self

    def __exit__(self, *_: object) -> None:
        global active  # noqa: PLW0603 - a process has one
        active = None
        self.undo.close()
        for mapping in sorted(shared_memory() - self._shared):
            self.findings.add(
                f"memory that processes share ({mapping}) is mapped at import", EVERY_TEST
            )

    @property
    def libraries(self) -> list[str]:
        """The imported modules of libraries that may be imported before ranks are forked.

        They are in the order of their import. The fork server without the user's modules imports
        them too.
        """
        libraries: list[str] = []
        for name in self._libraries:
            package = name.partition(".")[0]
            if package not in self._ranked:
                libraries.append(name)
        return libraries

    def watch_loader(self, kind: type[Any], own: Sequence[str] = ()) -> None:
        """Watch the modules that loaders of this class execute.

        Args:
            kind: A class of loaders, as ``importlib.machinery.SourceFileLoader``.
            own: Patterns of file names, as ``conftest.py`` and ``test_*.py``. Such files are the
                user's own code even if they are installed (``pytest --pyargs library``).
        """
        execute = kind.exec_module
        # If the method is a base class's, it must be deleted afterwards, not put back.
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
        """Return a context manager that watches a hook which calls the user's functions.

        What they read concerns every test.

        Args:
            name: What a finding calls the code, as ``a conftest.py``.
            alone: Whether a single function of the user's runs in the block. Then the random
                numbers that it draws and the files that it leaves open are found too.
        """
        return self._running(_Importing(name, "", own=True, alone=alone))

    def only_in(self, files: set[str]) -> None:
        """Make findings concern every test, but for those in these test modules.

        ``rank_session`` calls this when all tests are collected, with the files of the test
        modules. A finding in such a file concerns the tests of that file only. But if the name of
        the module occurs in the text of another module of the user's, that one may import it, and
        the finding concerns every test.
        """
        imported_nowhere_else = set()
        for file in files:
            real_file = os.path.realpath(file)
            if not self._is_named_elsewhere(real_file):
                imported_nowhere_else.add(real_file)
        # ``found`` is by variable, then by the file of the module that the finding concerns.
        for sentence_by_file in self.findings.found.values():
            for file in list(sentence_by_file):
                if file not in imported_nowhere_else:
                    sentence_by_file.setdefault(EVERY_TEST, sentence_by_file.pop(file))

    def is_own(self, file: str) -> bool:
        """Tell whether the file is the user's own code: no installed library, not this package."""
        if not file.endswith(".py") or file.startswith("<"):
            return False
        return os.path.realpath(file) in self._own or not is_installed(file)

    @contextlib.contextmanager
    def _running(self, started: _Importing) -> Iterator[None]:
        """Watch the code of a module or hook while the block runs it."""
        importer = self._importing[-1] if self._importing else None
        if not started.own:
            self._libraries.append(started.name)
        # A comparison takes time, and is needed only where the user's own code begins or ends. What
        # a library's code changes, which another library imports, is no finding.
        boundary = started.own or importer is None or importer.own
        if boundary:
            # What the importer has changed so far. What comes next is the imported module's.
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
        """Compare open files and random number generators with those at the last call.

        Args:
            report: Whether the code that ran since then is the user's own, so that a change is a
                finding.
        """
        files = open_files()
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
        """Add a finding about the module or hook that runs.

        Args:
            finding: What it does, as ``reads RANK``.
            file: The test module that the finding concerns, or ``EVERY_TEST``.
            location: The line that does it, as ``/repo/helper.py:4``; empty if unknown.
            variable: The environment variable on which the finding depends; empty for none.
        """
        importing = self._importing[-1]
        phase = "at import" if importing.file else "while tests are collected"
        culprit = location or importing.file or importing.name
        self.findings.add(f"{culprit} {finding} {phase}", file, variable)

    def _add_if_own(
        self, finding: str, frame: FrameType | None, variable: str = "", *, everywhere: bool = False
    ) -> bool:
        """Add a finding if the user's own code caused it; return whether it did.

        The innermost frame of the user's own code is the location of the finding.

        Args:
            finding: What the code does, as ``reads RANK``.
            frame: The frame that does it.
            variable: As for ``_add``.
            everywhere: Whether the finding concerns every test, whatever module does it.
        """
        if not self._importing or not self._importing[-1].own:
            return False
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            if module.partition(".")[0] in _PASSED_OVER:
                return False
            path = frame.f_code.co_filename
            if self.is_own(path):
                test_file = EVERY_TEST
                if not everywhere and self._concerns_importing_only(path):
                    test_file = self._importing[-1].file
                self._add(finding, test_file, f"{path}:{frame.f_lineno}", variable)
                return True
            frame = frame.f_back
        return False

    def _concerns_importing_only(self, path: str) -> bool:
        """Tell whether only the module that is being imported can have stored what was read.

        A function of another module may have read it, and that module may store it, for all its
        users. And a module that one of the user's modules imports may be imported by others too.

        Args:
            path: The file whose code read it.
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
            # A call that sets how many threads torch uses matters only where ranks have another
            # value of OMP_NUM_THREADS.
            variable = VARIABLE_BY_FINDING.get(finding, "")
            self._add_if_own(finding, frame, variable, everywhere=bool(variable))

    def _read_by(self, function: Any, frame: FrameType) -> str:
        """Return the finding about a C function that is called, as ``reads the clock``.

        It is empty if there is none.
        """
        # The object of a bound method; for a plain function of a module, that module.
        instance = getattr(function, "__self__", None)
        if isinstance(instance, _random.Random):
            return self._random_number_drawn(function.__name__, instance, frame)
        if type(instance).__module__ == "torch._C" and type(instance).__name__ == "Generator":
            return self._torch_generator_called(function.__name__, instance)
        if isinstance(instance, _socket.socket):
            return "uses a socket"
        if isinstance(instance, type):
            # A class method, as ``datetime.now``.
            reads_clock = function.__name__ in CLOCK_METHODS and issubclass(instance, dt.date)
            return READS_CLOCK if reads_clock else ""
        if not isinstance(function, BuiltinFunctionType):
            return ""
        return FINDING_BY_FUNCTION.get((function.__module__, function.__name__), "")

    def _random_number_drawn(self, name: str, generator: _random.Random, frame: FrameType) -> str:
        """Return the finding about a call of a generator's method; empty if it has a given seed.

        Args:
            name: The name of the method, as ``seed`` or ``random``.
            generator: The generator.
            frame: The frame that calls the method. For ``seed`` it is ``random.Random.seed``, whose
                argument ``a`` is the seed or None.
        """
        if name == "seed":
            if frame.f_locals.get("a") is not None:
                self._seeded.add(id(generator))
            else:
                self._seeded.discard(id(generator))
        if name == "setstate" or id(generator) in self._seeded:
            return ""
        return MAKES_RANDOM

    def _torch_generator_called(self, name: str, generator: Any) -> str:
        """Return the finding about a call of a torch generator's method; empty if there is none.

        Numbers that are drawn are found in another way: by the generator's state
        (``_compare_state``).
        """
        if name == "manual_seed":
            self._seeded.add(id(generator))
        if name == "seed":
            self._seeded.discard(id(generator))
            return MAKES_RANDOM
        # The default generator has another seed in each process; any other has the same in all.
        is_default = generator is sys.modules["torch"].default_generator
        if not is_default or id(generator) in self._seeded:
            return ""
        if name in {"initial_seed", "get_state"}:
            return MAKES_RANDOM
        return ""

    def _variable_read(self, name: str, frame: FrameType | None) -> None:
        """Add that the user's own code read a variable, or a library read which rank it is on.

        Args:
            name: The variable; empty if all of them were read.
            frame: The innermost frame, in ``os`` or in the watch itself.
        """
        # Whether it was by ``setdefault``, and the frame of the code that used ``os.environ``.
        by_default, frame = environment_use(frame)
        if by_default and is_discarded(frame):
            # ``os.environ.setdefault("RANK", "0")`` as a statement reads the variable too, but only
            # to make sure that there is a value: the code stores none.
            return
        what = name or "the whole environment"
        if self._add_if_own(f"reads {what}", frame, variable=name) or not self._importing:
            return
        # The variables that torchrun's agent sets for each rank, as ``RANK`` and ``WORLD_SIZE``.
        if OF_THE_AGENT.fullmatch(name) and not self._importing[-1].own:
            for importing in self._importing:
                if not importing.own:
                    self._ranked.add(importing.package)
            self._add(f"reads {name}", EVERY_TEST, "", variable=name)

    def _variable_written(self, name: str, frame: FrameType | None) -> None:
        """Add that the user's own code set ``RANK`` or the like: forked ranks have another value.

        ``setdefault`` does not count, since it leaves the value that a rank of torchrun has.
        """
        by_default, frame = environment_use(frame)
        if OF_THE_AGENT.fullmatch(name) and not by_default:
            self._add_if_own(f"sets {name}", frame, everywhere=True)

    def _watch_open(self, module: Any) -> None:
        """Find files that the user's own code opens with the ``open`` of this module.

        Args:
            module: ``builtins``, ``io`` or ``os``.
        """
        ordinary = module.open

        @functools.wraps(ordinary)
        def watched(file: Any, *args: Any, **kwargs: Any) -> Any:
            if active is self:
                differs = _writes(args, kwargs) or str(file).startswith(_PROCESS_FILES)
                if differs:
                    # ``caller`` returns the frame that opens the file.
                    self._add_if_own(f"opens {file!s:.200}, not only to read it,", caller())
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


#: Modules that read the clock and write files for their own purposes, not for their callers. What
#: they do while the user's code calls them is no finding.
_PASSED_OVER = {
    "importlib",
    "_frozen_importlib",
    "_frozen_importlib_external",
    "logging",
    "warnings",
}
_PASSED_OVER |= {"_pytest", "pytest", "pluggy", "hypothesis"}
#: Files that give each process other contents, so that even reading them is a finding.
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
