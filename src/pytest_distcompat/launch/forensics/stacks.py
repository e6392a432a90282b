"""Python stacks as faulthandler writes them: in which function, and at which line of whose code, a process was."""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import signal
import sysconfig
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat.launch import pristine_builtins

#: The main of a rank. The frames below it are the same in all stacks: agent, multiprocessing, fork server.
_MAIN = "pytest_distcompat/launch/rank.py"
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_STANDARD = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}, "<")
#: The ranks of a script may have another Python than this process: https://docs.python.org/3/library/sysconfig.html#installation-paths.
_ANY_STANDARD = re.compile(r"/.*/lib(64)?/python3\.\d+t?/")
_OUR_PACKAGE = Path(__file__).parents[2]

#: Makes a rank write the Python stack of each of its threads. A real-time signal, because programs do not use those.
STACK_SIGNAL = signal.SIGRTMIN + 7

#: What calls tests and trainers: frames that are the same in every stack.
_CALLERS = ("/_pytest/", "/pluggy/", "/pytest_distcompat/worker.py", "/pytest_distcompat/driver.py")

#: How the line ends with which faulthandler begins a thread.
_TITLE_END = "(most recent call first):"

#: How many characters of a source line are shown.
_SOURCE_LENGTH = 80


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The text of that line, cut; empty if the file cannot be read."""
        text = linecache.getline(self.file, self.line).strip()
        if len(text) > _SOURCE_LENGTH:
            text = f"{text[:_SOURCE_LENGTH]} ..."
        return text

    @property
    def where(self) -> str:
        """File and line; the file relative to the working directory or to the directory of installed packages."""
        path = Path(_PACKAGES.sub("", self.file))
        for base in (Path.cwd(), _OUR_PACKAGE.parent):
            if path.is_relative_to(base):
                path = path.relative_to(base)
        return f"{path}:{self.line}"

    @property
    def package(self) -> str:
        """The installed package of the file, or the directory that has the file."""
        if _PACKAGES.match(self.file):
            return _PACKAGES.sub("", self.file).split("/")[0]
        return str(Path(self.file).parent)

    @property
    def of_torch(self) -> bool:
        """Tell whether the file is torch's."""
        return "-packages/torch/" in self.file

    @property
    def of_rendezvous(self) -> bool:
        """Tell whether the code connects to a store, whose host need not be a rank."""
        return self.file.endswith("/torch/distributed/rendezvous.py")

    @property
    def calls_wait(self) -> bool:
        """Tell whether the line has the name ``wait``."""
        line = linecache.getline(self.file, self.line).strip()
        tokens = tokenize.generate_tokens(io.StringIO(line).readline)
        with contextlib.suppress(
            SyntaxError, tokenize.TokenError
        ):  # a statement may have further lines
            for token in tokens:
                if token.type == tokenize.NAME and token.string == "wait":
                    return True
        return False

    @property
    def of_python(self) -> bool:
        """Tell whether the code is of a standard library, this Python's or another's, or of no file."""
        standard = self.file.startswith(_STANDARD) or _ANY_STANDARD.match(self.file)
        return bool(standard) and not _PACKAGES.match(self.file)

    @property
    def of_the_user(self) -> bool:
        """Tell whether the file is neither Python's own, nor an installed package's, nor this package's."""
        return not (
            self.of_python
            or _PACKAGES.match(self.file)
            or Path(self.file).is_relative_to(_OUR_PACKAGE)
        )


def request_stack(pid: int) -> None:
    """Have a rank write its stacks, for which it needs neither the GIL nor the main thread's attention."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STACK_SIGNAL)


def stack_file(directory: str | Path, rank: int) -> Path:
    """Return the file to which that rank writes its stacks."""
    return Path(directory) / f"rank-{rank}.stack"


@dataclass(frozen=True)
class _Thread:
    """The stack of one thread: the line that names it, and the lines of its frames, innermost first."""

    title: str
    frames: list[str]

    @property
    def empty(self) -> bool:
        """Tell whether it has no Python frame, as a thread of C++ code has none, for which faulthandler has a line too."""
        return not any(line.startswith("  File ") for line in self.frames)

    def without_callers(self) -> _Thread:
        """Return the same thread without the frames of what called the test or trainer."""
        frames = []
        for line in self.frames:
            if not any(caller in line for caller in _CALLERS):
                frames.append(line)
        return _Thread(self.title, frames)

    def __str__(self) -> str:
        return "\n".join([self.title, *self.frames])


def _threads_above_main(stack: str) -> list[_Thread]:
    """Return each thread with its frames down to the rank's main, in the order in which faulthandler wrote them."""
    above_main: list[_Thread] = []
    below_main = False
    for line in stack.rstrip().splitlines():
        if not line.startswith("  "):
            above_main.append(_Thread(line, []))
            below_main = False
            continue
        if _MAIN in line:
            below_main = True
        if above_main and not below_main:
            above_main[-1].frames.append(line)
    return above_main


def threads(stack: str) -> list[list[Frame]]:
    """Return the frames of each thread, innermost first, down to the rank's main; the main thread first.

    faulthandler writes the newest thread first.
    """
    frames_by_thread = []
    for thread in reversed(_threads_above_main(stack)):
        frames = []
        for line in thread.frames:
            match = _FRAME.fullmatch(line)
            if match:
                frames.append(Frame(match["file"], int(match["line"]), match["function"]))
        if frames:
            frames_by_thread.append(frames)
    return frames_by_thread


def nearest(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame of the user's own code.

    Without one: the innermost of the package whose script runs, else of a library other than torch, else of all.
    """
    for frame in frames:
        if frame.of_the_user:
            return frame
    of_libraries = [frame for frame in frames if not (frame.of_python or frame.of_torch)]
    if not of_libraries:
        return frames[0]
    outermost = of_libraries[-1]
    if outermost.function == "<module>":
        for frame in of_libraries:
            if frame.package == outermost.package:
                return frame
    return of_libraries[0]


def without_launcher(stack: str) -> str:
    """Return the stack without the frames of what called the test or trainer, and those below the rank's main.

    The main thread comes first, which faulthandler writes last. Threads without a frame are left out. If no thread has one
    else, those of the callers are shown too.
    """
    above_main = list(reversed(_threads_above_main(stack)))
    shown = [thread.without_callers() for thread in above_main]
    if all(thread.empty for thread in shown):
        shown = above_main
    return "\n".join(str(thread) for thread in shown if not thread.empty)


def format_error(error: BaseException) -> str:
    """Return the traceback of an exception as text, from the first frame that is not of this plugin.

    If all frames are of this plugin, the last one remains.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        file = trace.tb_frame.f_code.co_filename
        # The trainers of this package are the user's story.
        if not file.startswith(f"{_OUR_PACKAGE}/") or "/drivers/" in file:
            break
        trace = trace.tb_next
    return "".join(pristine_builtins.format_exception(type(error), error, trace))


def without_launcher_in_crash(lines: Sequence[str]) -> list[str]:
    """Return the same for what faulthandler wrote when the process crashed, the crashed thread first as it wrote it.

    Its last line, which names all extension modules, is left out too.
    """
    shown: list[str] = []
    for thread in _threads_above_main("\n".join(lines)):
        if not thread.title or thread.title.startswith("Extension modules: "):
            continue
        above_callers = thread.without_callers()
        # Any other line that names no thread says what happened.
        if above_callers.empty and thread.title.endswith(_TITLE_END):
            continue
        shown += [above_callers.title, *above_callers.frames]
    return shown
