"""Python stacks that faulthandler wrote: at which line each thread was, without our own frames.

A rank that hangs writes the stacks of its threads to ``rank-0.stack`` when it gets the signal
``STACK_SIGNAL``: ``request_stack`` sends it. The text has, for each thread::

    Thread 0x00007f1 (most recent call first):
      File "/repo/train.py", line 12 in step
      File "/venv/.../site-packages/_pytest/python.py", line 166 in pytest_pyfunc_call
      File "/venv/.../site-packages/pytest_distcompat/launch/rank.py", line 150 in perform

``threads`` returns it as ``Frame`` objects, for ``collectives`` and ``stalled_ranks``, which read
where a rank waits. ``without_launcher`` returns it as text for reports. Both leave out the rank's
main function (``launch/rank.py``) and what called it. ``format_error`` does the same with the
traceback of an exception.
"""

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

#: The file of a rank's main function. What called it is the same in all stacks: torchrun's agent,
#: multiprocessing, or a fork server (the process from which a rank is forked).
_MAIN = "pytest_distcompat/launch/rank.py"
#: One line of a stack.
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
#: How the paths of installed packages begin.
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
#: How the paths of this Python's standard library begin. ``<`` is for code without a file, as
#: ``<frozen importlib._bootstrap>``.
_STANDARD = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}, "<")
#: Other Pythons' standard libraries, because a script's ranks may run on another Python than this
#: process: https://docs.python.org/3/library/sysconfig.html#installation-paths.
_ANY_STANDARD = re.compile(r"/.*/lib(64)?/python3\.\d+t?/")
_OUR_PACKAGE = Path(__file__).parents[2]

#: The signal at which a rank writes the Python stack of each of its threads. A real-time signal,
#: because programs do not use those.
STACK_SIGNAL = signal.SIGRTMIN + 7

#: Files whose code calls tests and trainers. Their frames are the same in every stack.
_CALLERS = ("/_pytest/", "/pluggy/", "/pytest_distcompat/worker.py", "/pytest_distcompat/driver.py")

#: The end of the line with which faulthandler begins each thread's stack.
_TITLE_END = "(most recent call first):"

#: How many characters of a source line are shown.
_SOURCE_LENGTH = 80


@dataclass(frozen=True)
class Frame:
    """One line of a stack: ``File "/repo/train.py", line 12 in step``."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The source text of the line, shortened; empty if the file cannot be read."""
        text = linecache.getline(self.file, self.line).strip()
        if len(text) > _SOURCE_LENGTH:
            text = f"{text[:_SOURCE_LENGTH]} ..."
        return text

    @property
    def where(self) -> str:
        """``file:line``, with the path relative to the working directory or to site-packages."""
        path = Path(_PACKAGES.sub("", self.file))
        for base in (Path.cwd(), _OUR_PACKAGE.parent):
            if path.is_relative_to(base):
                path = path.relative_to(base)
        return f"{path}:{self.line}"

    @property
    def package(self) -> str:
        """The installed package that the file belongs to (``accelerate``), or its directory."""
        if _PACKAGES.match(self.file):
            return _PACKAGES.sub("", self.file).split("/")[0]
        return str(Path(self.file).parent)

    @property
    def of_torch(self) -> bool:
        """Tell whether the file is torch's."""
        return "-packages/torch/" in self.file

    @property
    def of_rendezvous(self) -> bool:
        """Tell whether the code connects to a process group's store.

        The store is the server by which ranks find each other. Its host need not be a rank.
        """
        return self.file.endswith("/torch/distributed/rendezvous.py")

    @property
    def calls_wait(self) -> bool:
        """Tell whether the line calls ``wait``, as ``work.wait()`` does.

        The line is split into tokens, so that the word in a text or in a comment does not count.
        """
        line = linecache.getline(self.file, self.line).strip()
        tokens = tokenize.generate_tokens(io.StringIO(line).readline)
        # A statement that goes on in further lines cannot be tokenized to its end.
        with contextlib.suppress(SyntaxError, tokenize.TokenError):
            for token in tokens:
                if token.type == tokenize.NAME and token.string == "wait":
                    return True
        return False

    @property
    def of_python(self) -> bool:
        """Tell whether the code is in the standard library of any Python, or in no file at all."""
        standard = self.file.startswith(_STANDARD) or _ANY_STANDARD.match(self.file)
        return bool(standard) and not _PACKAGES.match(self.file)

    @property
    def of_the_user(self) -> bool:
        """Tell whether the code is the user's own.

        It is in no standard library, in no installed package and not in this one.
        """
        if self.of_python or _PACKAGES.match(self.file):
            return False
        return not Path(self.file).is_relative_to(_OUR_PACKAGE)


def request_stack(pid: int) -> None:
    """Send a rank the signal to write its stacks.

    faulthandler answers it in C: the rank writes even if its main thread hangs and holds the GIL.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STACK_SIGNAL)


def stack_file(directory: str | Path, rank: int) -> Path:
    """Return the path of the file to which a rank writes its stacks."""
    return Path(directory) / f"rank-{rank}.stack"


@dataclass(frozen=True)
class _Thread:
    """The text of one thread's stack.

    Attributes:
        title: The line that names the thread.
        frames: A line for each frame, innermost first.
    """

    title: str
    frames: list[str]

    @property
    def has_frames(self) -> bool:
        """Tell whether any line is a Python frame; a thread of C++ code has none."""
        return any(line.startswith("  File ") for line in self.frames)

    def without_callers(self) -> _Thread:
        """Return the thread without the frames that called the test or trainer (``_CALLERS``)."""
        frames = []
        for line in self.frames:
            if not any(caller in line for caller in _CALLERS):
                frames.append(line)
        return _Thread(self.title, frames)

    def __str__(self) -> str:
        return "\n".join([self.title, *self.frames])


def _threads_above_main(stack: str) -> list[_Thread]:
    """Split faulthandler's text into threads, without the rank's main and its callers.

    The threads keep the order of the text. A line without indentation begins a new one.
    """
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
    """Return the frames of each thread, innermost first, without the rank's main and its callers.

    The main thread comes first: faulthandler writes threads from the newest to the oldest.
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
    """Return the frame that tells a user the most about a stack, which is innermost first.

    It is the innermost frame of, in this order: the user's own code; the installed package whose
    script is running; any library but torch and Python's own; all code.

    Args:
        frames: The frames of one thread, innermost first; not empty.
    """
    for frame in frames:
        if frame.of_the_user:
            return frame
    of_libraries = [frame for frame in frames if not (frame.of_python or frame.of_torch)]
    if not of_libraries:
        return frames[0]
    # A script that is installed, as ``python -m library.train``, runs as ``<module>``.
    outermost = of_libraries[-1]
    if outermost.function == "<module>":
        for frame in of_libraries:
            if frame.package == outermost.package:
                return frame
    return of_libraries[0]


def without_launcher(stack: str) -> str:
    """Return a rank's stacks as text, with the frames of the test or trainer only.

    The main thread comes first. Left out are the rank's main with its callers, the frames of
    ``_CALLERS``, and threads without a frame. If nothing remained, the frames of ``_CALLERS`` are
    kept.
    """
    above_main = _threads_above_main(stack)
    # faulthandler writes the main thread last.
    above_main.reverse()
    shown = [thread.without_callers() for thread in above_main]
    if not any(thread.has_frames for thread in shown):
        shown = above_main
    texts = []
    for thread in shown:
        if thread.has_frames:
            texts.append(str(thread))
    return "\n".join(texts)


def format_error(error: BaseException) -> str:
    """Return the traceback of an exception as text, without this plugin's frames at its beginning.

    If all frames are this plugin's, the innermost one is shown.
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
    """Return the lines that faulthandler wrote at a crash, shortened as in ``without_launcher``.

    The order stays: the crashed thread comes first. The list of all extension modules, which
    faulthandler writes last, is left out.

    Args:
        lines: What faulthandler wrote, from ``Fatal Python error: Segmentation fault`` on.
    """
    shown: list[str] = []
    for thread in _threads_above_main("\n".join(lines)):
        if not thread.title or thread.title.startswith("Extension modules: "):
            continue
        shown_thread = thread.without_callers()
        begins_thread = thread.title.endswith(_TITLE_END)
        # A line that begins no thread says what happened: "Fatal Python error: Segmentation fault".
        if begins_thread and not shown_thread.has_frames:
            continue
        shown += [shown_thread.title, *shown_thread.frames]
    return shown
