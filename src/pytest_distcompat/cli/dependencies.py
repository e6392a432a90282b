"""Installed packages, what others add to this one, and which versions do not fit together.

``distcompat doctor`` (``cli.doctor``) prints what ``installed`` and ``extensions`` return, and the
findings of ``package_findings``, as ``problem: accelerate 1.2 requires torch>=2.6, and torch 2.5 is
installed``. The packages themselves are not imported: their metadata says all this. Other packages
add drivers (trainers under test), strategies, precisions, checks (claims about a training) and
executors (which start ranks on several machines) by entry points.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from packaging.requirements import Requirement

from pytest_distcompat.cli.machine import Finding
from pytest_distcompat.installed import GET_TORCH, fits, versions

#: The name of this package.
OURS = "pytest-distcompat"
#: Packages that depend on one another: each requires certain versions of some of the others.
STACK = ("torch", "accelerate", "transformers", "deepspeed", "torchao", "peft", "safetensors")
#: The extras, as in ``pip install NAME[EXTRA]``, whose requirements count; empty for no extra.
#: Others, such as an extra for developers, may pin versions that users do not need.
EXTRAS = ("", *STACK, "fp8", "lora")
#: Further packages that tests and reports need.
FURTHER = ("pytest", "pytest-xdist", "covertable", "transformer-engine")


def installed() -> dict[str, str]:
    """Return the installed packages with their versions."""
    return versions((OURS, *STACK, *FURTHER))


def extensions() -> dict[str, list[str]]:
    """Return what other packages add by entry points: ``{"strategy": ["hsdp of my-trainer"]}``.

    A kind without an addition is left out.
    """
    from pytest_distcompat.checks import CHECKS
    from pytest_distcompat.drivers import DRIVERS
    from pytest_distcompat.precisions import PRECISIONS
    from pytest_distcompat.registry import Registry
    from pytest_distcompat.strategies import STRATEGIES

    registries: dict[str, Registry[Any]] = {
        "driver": DRIVERS,
        "strategy": STRATEGIES,
        "precision": PRECISIONS,
        "check": CHECKS,
        "executor": Registry("pytest_distcompat.executors", object, "executor", has_modules=False),
    }
    added: dict[str, list[str]] = {}
    for kind, registry in registries.items():
        origins = []
        for origin in registry.extensions:
            # What this package itself adds in that way is nothing to report.
            if not origin.endswith(f" of {OURS}"):
                origins.append(origin)
        if origins:
            added[kind] = origins
    return added


def package_findings() -> Iterator[Finding]:
    """Yield packages that are missing, that are too old, or whose requirements are not met."""
    installed_versions = installed()
    if "torch" not in installed_versions:
        yield Finding("problem", f"torch is not installed: {GET_TORCH}")
    for requirement in _requirements(OURS, STACK):
        # About accelerate its driver says more, below.
        if requirement.name != "accelerate" and not _fits(requirement, installed_versions):
            found_package = f"{requirement.name} {installed_versions[requirement.name]}"
            problem = f"{found_package} is older than what {OURS} was tried with"
            yield Finding("problem", f"{problem}: {requirement}")
    if "accelerate" in installed_versions:
        yield from _accelerate_findings(installed_versions["accelerate"])
    for package in STACK:
        if package not in installed_versions:
            continue
        for requirement in _requirements(package, installed_versions):
            if not _fits(requirement, installed_versions):
                problem = f"{package} {installed_versions[package]} requires {requirement}"
                other = f"{requirement.name} {installed_versions[requirement.name]}"
                yield Finding("problem", f"{problem}, and {other} is installed")


def _accelerate_findings(version: str) -> Iterator[Finding]:
    """Yield what the driver of accelerate says about a version, as ``1.7.0``.

    It raises RuntimeError for one with which it does not work, and warns of one that was not tried.
    """
    from pytest_distcompat.launch.accelerate_cpu import check_version

    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            check_version(version)
    except RuntimeError as error:
        yield Finding("problem", str(error))
    for warning in warned:
        yield Finding("warning", str(warning.message))


def _requirements(package: str, among: Collection[str]) -> Iterator[Requirement]:
    """Yield the requirements of an installed package on other packages, each once.

    Args:
        package: The package that has the requirements, as ``transformers``.
        among: The packages of ``STACK`` that may be required. Requirements on others are left out.
    """
    relevant = set(STACK) & set(among) - {package}
    yielded: set[str] = set()
    for text in importlib.metadata.requires(package) or ():
        requirement = Requirement(text)
        # As ``torch>=2.6``, without the marker that says for which extra or Python it is: several
        # extras may have the same requirement.
        plain_text = f"{requirement.name}{requirement.specifier}"
        if requirement.name in relevant and plain_text not in yielded and _applies(requirement):
            yielded.add(plain_text)
            yield Requirement(plain_text)


def _applies(requirement: Requirement) -> bool:
    """Tell whether the requirement counts here.

    It does if it is one of the package itself, or of one of its ``EXTRAS``, for this Python and
    platform.
    """
    marker = requirement.marker
    if marker is None:
        return True
    return any(marker.evaluate({"extra": extra}) for extra in EXTRAS)


def _fits(requirement: Requirement, installed_versions: Mapping[str, str]) -> bool:
    """Tell whether the installed version fits, or none is installed."""
    version = installed_versions.get(requirement.name)
    return version is None or fits(requirement, version)
