"""Facts about a node that must be the same on all nodes of a run, or at least good enough."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_distcompat.devices import visible_gpus
from pytest_distcompat.installed import PACKAGES, versions

#: By how many seconds the clocks of two nodes may differ, and how much of /dev/shm must be free, in MiB.
CLOCKS_S, SHM_MIB = 5.0, 32
#: Directories that hold no source of the repository.
_NOT_SOURCE = {"node_modules", "__pycache__", "build", "dist", "site-packages"}


def facts(root: str, own: Iterable[str], device: str) -> dict[str, Any]:
    """Return the facts of this node, its clock aside; ``own`` are installed files of the user, ``root`` is the repository."""
    shm = Path("/dev/shm")  # noqa: S108 - that is where it is
    return {
        "versions": versions((*PACKAGES, "numpy")),
        "sources": {str(path): _digest(path) for path in sorted({*_sources(Path(root)), *map(Path, own)})},
        "shm": shutil.disk_usage(shm).free >> 20 if shm.exists() else 0,
        "gpus": visible_gpus() if device == "cuda" else 0,
    }


def differences(name: str, found: Mapping[str, Any], first: str, wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield in what the node ``name`` differs from the node ``first``."""
    for package in sorted({*found["versions"], *wanted["versions"]}):
        here, there = (facts["versions"].get(package, "not installed") for facts in (found, wanted))
        if here != there:
            yield f"{name} has {package} {here}, {first} has {there}"
    if wanted["sources"] and not found["sources"]:
        yield f"{name} has no source of the repository; expected it at the same path as on {first}"
        return
    for path in sorted({*found["sources"], *wanted["sources"]}):
        here, there = (facts["sources"].get(path, "") for facts in (found, wanted))
        if here != there:
            yield (
                f"{name} has another {path} than {first}"
                if here and there
                else f"{path} is on {name if here else first} only"
            )
            return
    apart = found["wall"] - wanted["wall"]
    if abs(apart) > CLOCKS_S:
        yield f"the clock of {name} is {apart:+.0f} s off that of {first}; expected {CLOCKS_S:g} s at most"
    if found["shm"] < SHM_MIB:
        yield f"{name} has {found['shm']} MiB free in /dev/shm; expected {SHM_MIB} at least"
    if found["gpus"] != wanted["gpus"]:
        yield f"{name} has {found['gpus']} visible GPUs, {first} has {wanted['gpus']}"


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def _sources(root: Path) -> Iterator[Path]:
    """Yield the Python files of a repository, without virtual environments and hidden directories."""
    for directory, inner, names in os.walk(root):
        inner[:] = [
            one
            for one in inner
            if one not in _NOT_SOURCE and one[0] != "." and not Path(directory, one, "pyvenv.cfg").exists()
        ]
        yield from (Path(directory, name) for name in names if name.endswith(".py"))
