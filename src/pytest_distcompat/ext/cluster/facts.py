"""Facts about a node that must be the same on all nodes of a run, or at least good enough.

A *node* is one of several machines that run a test together. Other versions or other source files
there would make ranks fail in ways that nobody understands. So each node's agent collects its
``facts(...)`` when it joins the session, and pytest's process compares them by ``differences(...)``
(``alike``) before the first run.

Facts are a dict, because they are sent as JSON:

- ``versions``: package -> version;
- ``sources``: path of each Python file of the repository -> digest (hash) of its content;
- ``shm``: how much of /dev/shm, where NCCL and DataLoaders keep memory, is free, in MiB;
- ``gpus``: the number of visible GPUs;
- ``wall``: the time of day, in seconds; the agent adds it when it sends the facts.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_distcompat.devices import visible_gpus
from pytest_distcompat.installed import PACKAGES, versions

#: By how many seconds the clocks of two nodes may differ, and how much of /dev/shm must be free, in
#: MiB.
CLOCKS_S, SHM_MIB = 5.0, 32
#: Directories that hold no source of the repository.
_NOT_SOURCE = {"node_modules", "__pycache__", "build", "dist", "site-packages"}


def facts(root: str, own: Iterable[str], device: str) -> dict[str, Any]:
    """Return the facts of this node, without ``wall``.

    Args:
        root: The root directory of the repository.
        own: Further Python files of the user, which are installed outside of the repository.
        device: ``cuda`` or ``cpu``.
    """
    paths = set(_sources(Path(root)))
    for path in own:
        paths.add(Path(path))
    shm = Path("/dev/shm")  # noqa: S108 - that is where it is
    free_mib = 0
    if shm.exists():
        free_mib = shutil.disk_usage(shm).free >> 20
    digests = {str(path): _digest(path) for path in sorted(paths)}
    gpus = 0
    if device == "cuda":
        gpus = visible_gpus()
    return {
        "versions": versions((*PACKAGES, "numpy")),
        "sources": digests,
        "shm": free_mib,
        "gpus": gpus,
    }


def differences(
    name: str, node_facts: Mapping[str, Any], first: str, first_facts: Mapping[str, Any]
) -> Iterator[str]:
    """Yield how a node differs from the first node, such as ``n2 has torch 2.9, n1 has 2.8``.

    Args:
        name: The name of the node.
        node_facts: Its facts; ``wall`` is how far its clock is ahead of that of pytest's process.
        first: The name of the first node.
        first_facts: The facts of the first node.
    """
    versions_of_node = node_facts["versions"]
    yield from _version_differences(name, versions_of_node, first, first_facts["versions"])
    digests = node_facts["sources"]
    source_difference = _source_difference(name, digests, first, first_facts["sources"])
    if source_difference is not None:
        # With other files nothing else is worth saying.
        yield source_difference
        return
    apart = node_facts["wall"] - first_facts["wall"]
    if abs(apart) > CLOCKS_S:
        difference = f"{apart:+.0f} s off that of {first}"
        yield f"the clock of {name} is {difference}; expected {CLOCKS_S:g} s at most"
    shm = node_facts["shm"]
    if shm < SHM_MIB:
        yield f"{name} has {shm} MiB free in /dev/shm; expected {SHM_MIB} at least"
    gpus = node_facts["gpus"]
    first_gpus = first_facts["gpus"]
    if gpus != first_gpus:
        yield f"{name} has {gpus} visible GPUs, {first} has {first_gpus}"


def _version_differences(
    name: str, versions: Mapping[str, str], first: str, first_versions: Mapping[str, str]
) -> Iterator[str]:
    """Yield each package of which two nodes have different versions."""
    for package in sorted({*versions, *first_versions}):
        version = versions.get(package, "not installed")
        first_version = first_versions.get(package, "not installed")
        if version != first_version:
            yield f"{name} has {package} {version}, {first} has {first_version}"


def _source_difference(
    name: str, digests: Mapping[str, str], first: str, first_digests: Mapping[str, str]
) -> str | None:
    """Return the first difference between the sources of two nodes; None if they are equal.

    Args:
        name: The name of the node.
        digests: Path -> digest of each source file on it.
        first: The name of the first node.
        first_digests: Those of the first node.
    """
    if first_digests and not digests:
        return f"{name} has no source of the repository; expected it at the same path as on {first}"
    for path in sorted({*digests, *first_digests}):
        digest = digests.get(path, "")
        first_digest = first_digests.get(path, "")
        if digest == first_digest:
            continue
        if digest and first_digest:
            return f"{name} has another {path} than {first}"
        place = name if digest else first
        return f"{path} is on {place} only"
    return None


def _digest(path: Path) -> str:
    """Return a digest of a file's content; empty if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def _sources(root: Path) -> Iterator[Path]:
    """Yield the Python files of a repository.

    Virtual environments and hidden directories are left out.
    """
    for directory, inner, names in os.walk(root):
        # Changed in place: what is removed is not walked.
        inner[:] = [folder for folder in inner if _may_hold_sources(Path(directory, folder))]
        for name in names:
            if name.endswith(".py"):
                yield Path(directory, name)


def _may_hold_sources(folder: Path) -> bool:
    """Tell whether a directory may have sources: no build, no environment, nothing hidden."""
    if folder.name in _NOT_SOURCE or folder.name.startswith("."):
        return False
    return not (folder / "pyvenv.cfg").exists()
