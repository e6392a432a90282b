"""NCCL as ranks load it: its version, and the variable with which several ranks may use one GPU.

NCCL refused two ranks on one GPU until 2.30. Since then it takes them where ``NCCL_MULTI_RANK_GPU_ENABLE=1`` is set.
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

#: The first version that takes several ranks on one GPU: the variable's name is in 2.30.7, and not in 2.29.7.
SHARES_FROM = (2, 30)
#: What a user with an older library can do.
CURE = "NCCL 2.30 or newer takes ranks that share a GPU: pip install --upgrade 'pytest-distcompat[one-gpu]'"
#: How long the process that asks the library may take, in seconds. The library is some hundred MiB large.
ASK_TIMEOUT_S = 60.0
#: Prints the code of the version. A process of its own asks, since pytest and fork servers keep CUDA's libraries out.
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
    """Return the file of the library that ranks load; None without.

    It is one that LD_PRELOAD names, else that of NVIDIA's wheel, one that came with torch, or one of conda's environment.
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
    """Return the directories of an installed package, without importing it; none if it is not installed."""
    try:
        spec = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        # ValueError: a stand-in for the package, without a specification.
        return []
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(location) for location in spec.submodule_search_locations]


def library() -> Library | None:
    """Return the library that ranks load; None if there is none, or it does not tell its version."""
    path = library_path()
    return None if path is None else _asked(path)


#: What each library said, so that it is loaded once a session.
_answers: dict[Path, Library | None] = {}


def answers() -> list[Library]:
    """Return the libraries that have told their version, for a process that is to know it too."""
    return [library for library in _answers.values() if library is not None]


def tell(libraries: Iterable[Library]) -> None:
    """Have this process, and those forked from it, know these libraries without loading them."""
    for library in libraries:
        _answers[library.path] = library


def _asked(path: Path) -> Library | None:
    if path not in _answers:
        _answers[path] = _ask_in_a_process(path)
    return _answers[path]


def _ask_in_a_process(path: Path) -> Library | None:
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
    return Library(path, (major, *divmod(rest, 100)))


def environment_of_shared_ranks() -> dict[str, str]:
    """Return the variables for ranks that share a GPU: with them NCCL takes such ranks; empty where it cannot."""
    loaded = library()
    if loaded is None or not loaded.shares_gpus:
        return {}
    return {SHARES_GPUS: "1"}
