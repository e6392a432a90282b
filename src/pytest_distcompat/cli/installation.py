"""Installed packages, and those whose versions do not fit together."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Collection, Iterator
from typing import Any

from packaging.requirements import Requirement

from pytest_distcompat.cli.machine import Finding
from pytest_distcompat.installed import fits, versions

OURS = "pytest-distcompat"
#: Packages that depend on one another: a version of one requires versions of the others.
STACK = ("torch", "accelerate", "transformers", "deepspeed", "torchao", "peft", "safetensors")
#: The extras for packages of the stack. Others, such as an extra for developers, may pin versions that users do not need.
EXTRAS = ("", *STACK, "fp8", "lora")
#: Further packages that tests and reports need.
FURTHER = ("pytest", "pytest-xdist", "covertable", "transformer-engine")


def installed() -> dict[str, str]:
    """Return the installed packages with their versions."""
    return versions((OURS, *STACK, *FURTHER))


def extensions() -> dict[str, list[str]]:
    """Return what other packages add by entry points, by kind: ``{"strategy": ["hsdp of my-trainer"]}``."""
    from pytest_distcompat.checks import CHECKS
    from pytest_distcompat.drivers import DRIVERS
    from pytest_distcompat.executors import EXECUTORS
    from pytest_distcompat.precisions import PRECISIONS
    from pytest_distcompat.registry import Registry
    from pytest_distcompat.strategies import STRATEGIES

    registries: dict[str, Registry[Any]] = {
        "driver": DRIVERS,
        "strategy": STRATEGIES,
        "precision": PRECISIONS,
        "check": CHECKS,
        "executor": EXECUTORS,
    }
    return {kind: list(registry.extensions) for kind, registry in registries.items() if registry.extensions}


def findings() -> Iterator[Finding]:
    """Yield packages that are missing, that are too old, or whose requirements are not met."""
    from pytest_distcompat.drivers.accelerate import check_version

    found = installed()
    if "torch" not in found:
        yield Finding("problem", "torch is not installed: pip install 'pytest-distcompat[torch]'")
    for requirement in _requirements(OURS, STACK):
        # The driver of accelerate gives its reason, below.
        if requirement.name != "accelerate" and not _fits(requirement, found):
            problem = f"{requirement.name} {found[requirement.name]} is older than what {OURS} was tried with"
            yield Finding("problem", f"{problem}: {requirement}")
    if "accelerate" in found:
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                check_version(found["accelerate"])
        except RuntimeError as error:
            yield Finding("problem", str(error))
        yield from (Finding("warning", str(one.message)) for one in warned)
    for package in STACK:
        for requirement in _requirements(package, found) if package in found else ():
            if not _fits(requirement, found):
                problem = f"{package} {found[package]} requires {requirement}"
                yield Finding("problem", f"{problem}, and {requirement.name} {found[requirement.name]} is installed")


def _requirements(package: str, among: Collection[str]) -> Iterator[Requirement]:
    """Yield what the package requires of these packages, each once, with the extras for the stack."""
    requirements: dict[str, None] = {}
    for requirement in map(Requirement, importlib.metadata.requires(package) or ()):
        marker = requirement.marker
        applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS)
        if applies and requirement.name in {*STACK} & {*among} - {package}:
            requirements[f"{requirement.name}{requirement.specifier}"] = None
    yield from map(Requirement, requirements)


def _fits(requirement: Requirement, found: dict[str, str]) -> bool:
    version = found.get(requirement.name)
    return version is None or fits(requirement, version)
