"""The NCCL that ranks load: its version, and whether several ranks can use one GPU with it.

NCCL refuses two ranks on one GPU. From 2.30 on it accepts them if ``NCCL_MULTI_RANK_GPU_ENABLE=1``
is set. On a machine with fewer GPUs than ranks the session asks ``library()``, which returns, say,
``Library(path, (2, 29, 7))``: with that one, ranks that share a GPU use gloo. ``leased`` sets the
variable (``environment_of_shared_ranks``), and ``distcompat doctor`` shows the version.

Neither pytest nor a fork server, a process from which ranks are forked, loads the library: that
could open CUDA or start threads, after which a process must not be forked (``preload``). So another
process reads the version, once in a session: ``launcher_process`` passes it on from pytest's
process (``answers``) to the fork servers (``set_libraries``).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat.world import SHARES_GPUS

#: The first version that accepts several ranks on one GPU: 2.30.7 has the variable, 2.29.7 does
#: not.
SHARES_FROM = (2, 30)
#: What a user with an older library can do.
CURE = (
    "NCCL 2.30 or newer takes ranks that share a GPU: "
    "pip install --upgrade 'pytest-distcompat[one-gpu]'"
)
#: Time limit for the process that loads the library, in seconds. It has some hundred MiB.
ASK_TIMEOUT_S = 60.0
#: A program that prints the code of the version: 23007 for 2.30.7.
#: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/comms.html#ncclgetversion
_ASK = """
import ctypes, sys
version = ctypes.c_int()
status = ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version))
print(version.value if status == 0 else "")
"""


@dataclass(frozen=True)
class Library:
    """A library of NCCL: its file, and its version as ``(2, 30, 7)``."""

    path: Path
    version: tuple[int, int, int]

    @property
    def shares_gpus(self) -> bool:
        """Tell whether several ranks may use one GPU."""
        return self.version >= SHARES_FROM

    def __str__(self) -> str:
        return f"NCCL {'.'.join(map(str, self.version))}"


def library_path() -> Path | None:
    """Return the file of the library that ranks load; None if there is none.

    It is the first of: a library in LD_PRELOAD, the one of NVIDIA's wheel, the one that came with
    torch, the one of conda's environment.
    """
    for entry in os.environ.get("LD_PRELOAD", "").replace(":", " ").split():
        if Path(entry).name.startswith("libnccl.so"):
            return Path(entry)
    directories = [
        *_package_directories("nvidia.nccl"),
        *_package_directories("torch"),
        Path(sys.prefix),
    ]
    for directory in directories:
        path = directory / "lib" / "libnccl.so.2"
        if path.exists():
            return path
    return None


def _package_directories(name: str) -> list[Path]:
    """Return the directories of a package without importing it; none if it is not installed."""
    try:
        spec = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        # ValueError: a test has put a module without a specification in place of the package.
        return []
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(location) for location in spec.submodule_search_locations]


def library() -> Library | None:
    """Return the library that ranks load; None if there is none, or its version cannot be read."""
    path = library_path()
    if path is None:
        return None
    if path not in _answers:
        _answers[path] = _read_version(path)
    return _answers[path]


#: The libraries whose version was read, by file, so that each is loaded once in a session. None if
#: the version could not be read.
_answers: dict[Path, Library | None] = {}


def answers() -> list[Library]:
    """Return the libraries whose version this process knows, to pass them on to another one."""
    return [library for library in _answers.values() if library is not None]


def set_libraries(libraries: Iterable[Library]) -> None:
    """Store the versions of libraries, so that neither this process nor its children load them."""
    for library in libraries:
        _answers[library.path] = library


def _read_version(path: Path) -> Library | None:
    """Load a library in another process, and return it with its version; None if that fails."""
    command = [sys.executable, "-c", _ASK, str(path)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    code = done.stdout.strip()
    if not code.isdecimal():
        return None
    # Since 2.9 the code is X * 10000 + Y * 100 + Z.
    major, rest = divmod(int(code), 10_000)
    minor, patch = divmod(rest, 100)
    return Library(path, (major, minor, patch))


def environment_of_shared_ranks() -> dict[str, str]:
    """Return the variables with which NCCL accepts ranks that share a GPU; none if it cannot."""
    loaded = library()
    if loaded is None or not loaded.shares_gpus:
        return {}
    return {SHARES_GPUS: "1"}
