"""``distcompat doctor``: reports what is installed, what can run here, and what is wrong.

It runs no test. ``cli.main`` calls ``add`` for the parser, and then ``_doctor`` with the parsed
arguments. The facts come from three modules. ``cli.machine`` knows environment and devices,
``cli.dependencies`` the installed packages; both make *findings*, as ``Finding("warning", "/dev/shm
has 64 MiB free; ...")``. ``cli.capabilities`` knows which *cells* each *driver* can run here. A
driver is a trainer under test, as ``accelerate``. A cell is a configuration of it, as
``fsdp2-fp32-w2``: strategy, precision, 2 ranks. A *known issue* is a bug of another project that is
present in the installed versions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.cli import dependencies, machine
from pytest_distcompat.cli.machine import Finding, Machine
from pytest_distcompat.devices import CPU_WORLD_SIZE
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.launch.nccl import CURE

if TYPE_CHECKING:
    from pytest_distcompat.cli.capabilities import Capability
    from pytest_distcompat.known import KnownIssue


def add(commands: Any) -> None:
    """Add the subcommand; ``commands`` is what argparse's ``add_subparsers`` returned."""
    doctor = commands.add_parser(
        "doctor",
        help="what is installed, what can be run here, what is wrong",
        description="Look at this machine and its packages; run no test. "
        "Exit code 0: no problem, 1: at least one.",
    )
    doctor.add_argument(
        "--driver",
        action="append",
        metavar="NAME",
        help="only this driver (module:attribute: your own)",
    )
    doctor.add_argument(
        "--gpus",
        type=int,
        default=0,
        metavar="N",
        help="fewer visible GPUs than that are a problem",
    )
    doctor.add_argument(
        "--known",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="more known issues (TOML)",
    )
    doctor.add_argument(
        "--all", action="store_true", help="show why other cells cannot run, and each known issue"
    )
    doctor.add_argument("--strict", action="store_true", help="a warning is a problem")
    # ``finds_drivers``: a driver may be a module in the working directory.
    doctor.set_defaults(call=_doctor, finds_drivers=True)


def _doctor(options: argparse.Namespace) -> int:
    """Run the subcommand; return 1 if there is a problem, else 0."""
    from pytest_distcompat.cli.capabilities import capability, issues_here
    from pytest_distcompat.drivers import DRIVERS, find_driver
    from pytest_distcompat.known import read_file, shipped

    if options.gpus < 0:
        raise UsageProblem(
            f"--gpus {options.gpus} is not right: expected a whole number of at least 0"
        )
    names = options.driver or list(DRIVERS.names())
    drivers = [find_driver(name) for name in names]
    issues: list[KnownIssue] = []
    for path in options.known:
        issues += read_file(path)
    issues += shipped()
    inspected = machine.this_machine()
    world_size = len(inspected.visible) or CPU_WORLD_SIZE
    with ThreadPoolExecutor(1) as pool:
        # Another process imports torch meanwhile, which takes as long as the rest.
        torch = pool.submit(machine.torch_infos)
        capabilities = [
            capability(name, driver, inspected.device, world_size, issues, whole=options.all)
            for name, driver in zip(names, drivers, strict=True)
        ]
        inspected = replace(inspected, torch=torch.result())
    findings = list(_findings(inspected, options.gpus, capabilities))
    # Those that the installed versions have, each with the names of the drivers concerned.
    known = issues_here(issues, drivers, inspected.device)
    print(
        "\n".join(_lines(inspected, world_size, capabilities, known, findings, whole=options.all))
    )
    failing = {"problem"}
    if options.strict:
        failing.add("warning")
    failed = any(finding.level in failing for finding in findings)
    print(_verdict(findings, failed=failed, strict=options.strict))
    return int(failed)


def _verdict(findings: Sequence[Finding], *, failed: bool, strict: bool) -> str:
    """Return the last line: ``verdict: FAIL: 1 problem, 2 warnings, 0 notes``."""
    levels = [finding.level for finding in findings]
    parts = []
    for level in ("problem", "warning", "note"):
        count = levels.count(level)
        plural = "" if count == 1 else "s"
        parts.append(f"{count} {level}{plural}")
    if strict:
        parts.append("--strict")
    word = "FAIL" if failed else "ok"
    return f"verdict: {word}: {', '.join(parts)}"


def _findings(
    inspected: Machine, wanted_gpus: int, capabilities: Sequence[Capability]
) -> Iterator[Finding]:
    """Yield what is wrong with the packages and the machine, and what a suite would lack.

    Args:
        inspected: The facts about the machine.
        wanted_gpus: The number of GPUs that the user wants (``--gpus``); 0 for any.
        capabilities: What each driver can run.
    """
    yield from dependencies.package_findings()
    yield from machine.findings(inspected)
    visible = len(inspected.visible)
    if visible < wanted_gpus:
        gpus = f"{visible} of {len(inspected.gpus)} are visible"
        yield Finding("problem", f"{wanted_gpus} GPUs are wanted, {gpus}")
    if not any(capability.able for capability in capabilities):
        # No suite has a cell to run. ``reasons`` of a capability has each cell to the reason why it
        # cannot run. A dictionary, to have each reason once and in order.
        reasons: dict[str | None, None] = {}
        for capability in capabilities:
            reasons |= dict.fromkeys(capability.reasons.values())
        texts = list(filter(None, reasons))
        first_reasons = "; ".join(texts[:3])
        yield Finding("problem", f"no cell can run here, so a suite fails: {first_reasons}")


def _lines(
    inspected: Machine,
    world_size: int,
    capabilities: Sequence[Capability],
    known: Sequence[tuple[KnownIssue, list[str]]],
    findings: Sequence[Finding],
    *,
    whole: bool,
) -> Iterator[str]:
    """Yield the lines for the terminal.

    Args:
        inspected: The facts about the machine.
        world_size: The number of ranks of each cell.
        capabilities: What each driver can run.
        known: The known issues that are present, each with the names of the drivers concerned.
        findings: What is wrong.
        whole: Whether to show every reason and link (``--all``).
    """
    yield "installed"
    versions = []
    for name, version in dependencies.installed().items():
        versions.append(f"{name} {version}")
    yield f"  {', '.join(versions)}"
    for kind, origins in dependencies.extensions().items():
        for origin in origins:
            yield f"  {kind} {origin}"
    yield ""
    yield "devices"
    for line in _devices(inspected):
        yield f"  {line}"
    yield ""
    hint = "" if whole else "; --all gives the reasons of the others"
    place = f"({world_size} ranks, {inspected.device})"
    yield f"cells that can be run here, those without options one by one {place}{hint}"
    for capability in capabilities:
        for line in capability.lines(whole=whole):
            yield f"  {line}"
    yield ""
    hint = "" if whole or not known else " (--all lists them)"
    yield f"known upstream issues of these versions on {inspected.device}: {len(known)}{hint}"
    if whole:
        for issue, drivers in known:
            place = f"{issue.id} ({', '.join(drivers)})"
            yield f"  {place}: {issue.reason} ({issue.link})"
    yield ""
    for finding in findings:
        yield f"{finding.level}: {finding.text}"


def _devices(inspected: Machine) -> Iterator[str]:
    """Yield the lines about CPU cores, GPUs, and what connects ranks."""
    visible = f"{len(inspected.visible)} visible"
    yield f"{inspected.cores} CPU cores; {len(inspected.gpus)} GPUs, {visible}"
    torch = inspected.torch
    # A finding says why torch cannot be imported.
    if "error" in torch:
        return
    gpus = f"{len(torch['gpus'])} GPUs"
    if torch["gpus"]:
        names = dict.fromkeys(torch["gpus"])
        gpus += f" ({', '.join(names)})"
    yield f"torch is built for {_platform(torch)}; it can use {gpus}"
    gloo = "gloo" if torch["gloo"] else "no gloo"
    nccl = "no NCCL"
    if torch["has_nccl"]:
        nccl = f"NCCL {torch['nccl']}".strip()
    yield f"ranks talk through {gloo} on the CPU; for GPUs there is {nccl}"
    library = inspected.nccl
    if library is not None:
        # ``CURE`` is the advice to install a newer NCCL.
        sharing = f"takes one rank a GPU. {CURE}"
        if library.shares_gpus:
            sharing = "takes several ranks of one GPU"
        yield f"ranks load {library} ({library.path}), which {sharing}"


def _platform(torch: Mapping[str, Any]) -> str:
    """Return what torch is built for, in words."""
    if torch["cuda"]:
        return f"CUDA {torch['cuda']}"
    if torch["hip"]:
        return f"ROCm {torch['hip']}"
    return "the CPU only"
