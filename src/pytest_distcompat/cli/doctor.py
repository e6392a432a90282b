"""``doctor``: what is here, what can be run with it, and what is wrong with it. Runs no test."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.cli.drivers import named

if TYPE_CHECKING:
    from pytest_distcompat.cli.capabilities import Capability
    from pytest_distcompat.cli.machine import Finding, Machine
    from pytest_distcompat.known import KnownIssue

#: Ranks on the CPU, as pytest has them where nobody says.
CPU_WORLD_SIZE = 2


def add(commands: Any) -> None:
    """Add the subcommand to the parser's."""
    doctor = commands.add_parser(
        "doctor",
        help="what is installed, what can be run here, what is wrong",
        description="Look at this machine and its packages; run no test. Exit code 0: no problem, 1: at least one.",
    )
    doctor.add_argument(
        "--driver", action="append", metavar="NAME", help="only this driver (module:attribute: your own)"
    )
    doctor.add_argument("--gpus", type=int, default=0, metavar="N", help="fewer visible GPUs than that are a problem")
    doctor.add_argument(
        "--known", type=Path, action="append", default=[], metavar="FILE", help="more known issues (TOML)"
    )
    doctor.add_argument("--all", action="store_true", help="tell every reason, and every known issue with its link")
    doctor.add_argument("--strict", action="store_true", help="a warning is a problem")
    doctor.add_argument("--json", action="store_true", help="write it all as JSON")
    doctor.set_defaults(call=_doctor)


def _doctor(told: argparse.Namespace) -> int:
    from pytest_distcompat.cli import installation, machine
    from pytest_distcompat.cli.capabilities import capability, issues_here
    from pytest_distcompat.drivers import DRIVERS
    from pytest_distcompat.known import read_file, shipped

    names = told.driver or list(DRIVERS.names())
    drivers = [named(name) for name in names]
    issues = [issue for path in told.known for issue in read_file(path)] + list(shipped())
    here = machine.this_machine()
    size = len(here.visible) or CPU_WORLD_SIZE
    found = [*installation.findings(), *machine.findings(here), *_too_few(here, told.gpus)]
    can = [capability(name, driver, here.device, size, issues) for name, driver in zip(names, drivers, strict=True)]
    met = issues_here(issues, drivers, here.device)
    if told.json:
        print(json.dumps(_json(here, installation.installed(), can, met, found), indent=1))  # noqa: T201 - a command speaks
    else:
        print("\n".join(_lines(here, installation.installed(), can, met, found, whole=told.all)))  # noqa: T201 - a command speaks
    wrong = {"problem", "warning"} if told.strict else {"problem"}
    return int(any(finding.level in wrong for finding in found))


def _too_few(here: Machine, wanted: int) -> Iterator[Finding]:
    from pytest_distcompat.cli.machine import Finding

    if len(here.visible) < wanted:
        yield Finding("problem", f"{wanted} GPUs are wanted, {len(here.visible)} of {len(here.gpus)} are visible")


def _lines(
    here: Machine,
    packages: dict[str, str],
    can: list[Capability],
    met: list[tuple[KnownIssue, list[str]]],
    found: list[Finding],
    *,
    whole: bool,
) -> Iterator[str]:
    yield "installed"
    yield f"  {', '.join(f'{name} {version}' for name, version in packages.items())}"
    yield ""
    yield "devices"
    yield from (f"  {line}" for line in _devices(here))
    yield ""
    size = len(here.visible) or CPU_WORLD_SIZE
    yield f"cells that can be run here, those without options one by one ({size} ranks, {here.device})"
    for one in can:
        yield from (f"  {line}" for line in one.lines(whole=whole))
    yield ""
    yield f"known upstream issues of these versions on {here.device}: {len(met)}"
    for issue, drivers in met:
        yield f"  {issue.id} ({', '.join(drivers)})" + (f": {issue.reason} ({issue.link})" if whole else "")
    yield ""
    counts = {level: sum(finding.level == level for finding in found) for level in ("problem", "warning", "note")}
    yield ", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items())
    yield from (f"  {finding.level}: {finding.text}" for finding in found)


def _devices(here: Machine) -> Iterator[str]:
    yield f"{here.cores} CPU cores; {len(here.gpus)} GPUs, {len(here.visible)} visible"
    torch = here.torch
    if "error" in torch:
        return
    built = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "the CPU only"
    yield f"torch is built for {built}; it can use {len(torch['gpus'])} GPUs{_named(torch['gpus'])}"
    nccl = f"NCCL {torch['nccl']}".strip() if torch["has_nccl"] else "no NCCL"
    yield f"ranks talk through {'gloo' if torch['gloo'] else 'no gloo'} on the CPU; for GPUs there is {nccl}"


def _named(gpus: list[str]) -> str:
    return f" ({', '.join(dict.fromkeys(gpus))})" if gpus else ""


def _json(
    here: Machine,
    packages: dict[str, str],
    can: list[Capability],
    met: list[tuple[KnownIssue, list[str]]],
    found: list[Finding],
) -> dict[str, Any]:
    # The environment may hold secrets.
    machine = {field.name: getattr(here, field.name) for field in dataclasses.fields(here) if field.name != "environ"}
    issues = [
        {"id": issue.id, "link": issue.link, "reason": issue.reason, "checks": issue.check, "drivers": drivers}
        for issue, drivers in met
    ]
    return {
        "installed": packages,
        "machine": {**machine, "device": here.device},
        "cells": [one.to_json() for one in can],
        "known": issues,
        "findings": [dataclasses.asdict(finding) for finding in found],
    }
