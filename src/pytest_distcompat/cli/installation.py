"""What is installed, and which of it does not go together."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Collection, Iterator

from packaging.requirements import Requirement

from pytest_distcompat.cli.machine import Finding
from pytest_distcompat.installed import fits
from pytest_distcompat.report import versions

OURS = "pytest-distcompat"
#: What stands on one another: a version of one asks for versions of the others.
STACK = ("torch", "accelerate", "transformers", "deepspeed", "torchao", "peft", "safetensors")
#: The extras that are for one of the stack: an extra for a package's own developers may pin what nobody else needs.
EXTRAS = ("", *STACK, "fp8", "adapter")
#: What runs and reports need besides.
BESIDE = ("pytest", "pytest-xdist", "covertable", "transformer-engine")


def installed() -> dict[str, str]:
    """Package to version."""
    return versions((OURS, *STACK, *BESIDE))


def findings() -> Iterator[Finding]:
    """Packages that are missing, that are older than what we were tried with, or that ask for another version of another."""
    from pytest_distcompat.drivers.accelerate import check_version

    found = installed()
    if "torch" not in found:
        yield Finding("problem", "torch is not installed: pip install 'pytest-distcompat[torch]'")
    for requirement in _wanted(OURS, STACK):
        # Of accelerate the driver says why.
        if requirement.name != "accelerate" and not _fits(requirement, found):
            told = f"{requirement.name} {found[requirement.name]} is older than what {OURS} was tried with"
            yield Finding("problem", f"{told}: {requirement}")
    if "accelerate" in found:
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                check_version(found["accelerate"])
        except RuntimeError as error:
            yield Finding("problem", str(error))
        yield from (Finding("warning", str(one.message)) for one in warned)
    for package in STACK:
        for requirement in _wanted(package, found) if package in found else ():
            if not _fits(requirement, found):
                told = f"{package} {found[package]} asks for {requirement}"
                yield Finding("problem", f"{told}, and {requirement.name} {found[requirement.name]} is installed")


def _wanted(package: str, of: Collection[str]) -> Iterator[Requirement]:
    """What the package's metadata asks of these, each once: itself, and with an extra that is for one of them."""
    wanted: dict[str, None] = {}
    for requirement in map(Requirement, importlib.metadata.requires(package) or ()):
        marker = requirement.marker
        asks = marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS)
        if asks and requirement.name in {*STACK} & {*of} - {package}:
            wanted[f"{requirement.name}{requirement.specifier}"] = None
    yield from map(Requirement, wanted)


def _fits(requirement: Requirement, found: dict[str, str]) -> bool:
    version = found.get(requirement.name)
    return version is None or fits(requirement, version)
