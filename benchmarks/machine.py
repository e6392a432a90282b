"""On what a benchmark's figures were measured: the line above its table."""

from __future__ import annotations

import importlib.metadata
import os
import platform

#: What a trainer's tests import.
PACKAGES = ("torch", "accelerate", "transformers", "deepspeed")


def measured_on(*packages: str) -> str:
    """``2 cores, Linux, Python 3.11.7, torch 2.13.0``: this machine, and the versions of what was run."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    here = [f"{os.cpu_count()} cores", platform.system(), f"Python {platform.python_version()}"]
    return ", ".join((*here, *versions))
