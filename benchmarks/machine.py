"""On what a benchmark's figures were measured: the line above its table."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Collection

#: What a trainer's tests import.
PACKAGES = ("torch", "accelerate", "transformers", "deepspeed")


def measured_on(*packages: str) -> str:
    """``2 cores, Linux, Python 3.11.7, torch 2.13.0``: this machine, and the versions of what was run."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    here = [f"{os.cpu_count()} cores", platform.system(), f"Python {platform.python_version()}"]
    return ", ".join((*here, *versions))


def needs(parser: argparse.ArgumentParser, module: str) -> None:
    """End, with what to install, where a module of the group ``bench`` is missing: another's way would fail by our fault."""
    if importlib.util.find_spec(module) is None:
        parser.error(f"{module} is not installed: pip install --group bench")


def expect(parser: argparse.ArgumentParser, given: Collection[str], known: Collection[str]) -> None:
    """End, with the right words, at a name that there is not."""
    for name in given:
        if name not in known:
            parser.error(f"no {name!r}; expected some of: {', '.join(known)}")
