"""``doctor``: reports what is installed, what can run here, and what is wrong. Runs no test."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.cli import machine
from pytest_distcompat.cli.machine import Finding, Machine
from pytest_distcompat.devices import CPU_WORLD_SIZE
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.launch.nccl import CURE

if TYPE_CHECKING:
    from pytest_distcompat.cli.capabilities import Capability
    from pytest_distcompat.known import KnownIssue


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
    doctor.add_argument("--all", action="store_true", help="show why other cells cannot run, and each known issue")
    doctor.add_argument("--strict", action="store_true", help="a warning is a problem")
    doctor.set_defaults(call=_doctor, finds_drivers=True)


def _doctor(options: argparse.Namespace) -> int:
    from pytest_distcompat.cli.capabilities import capability, issues_here
    from pytest_distcompat.drivers import DRIVERS, find_driver
    from pytest_distcompat.known import read_file, shipped

    if options.gpus < 0:
        raise UsageProblem(f"--gpus {options.gpus} is not right: expected a whole number of at least 0")
    names = options.driver or list(DRIVERS.names())
    drivers = [find_driver(name) for name in names]
    issues = [issue for path in options.known for issue in read_file(path)] + list(shipped())
    here = machine.this_machine()
    size = len(here.visible) or CPU_WORLD_SIZE
    with ThreadPoolExecutor(1) as pool:
        # Another process imports torch meanwhile, which takes as long as the rest.
        torch = pool.submit(machine.torch_infos)
        cells = [
            capability(name, driver, here.device, size, issues, whole=options.all)
            for name, driver in zip(names, drivers, strict=True)
        ]
        here = replace(here, torch=torch.result())
    findings = list(_findings(here, options.gpus, cells))
    known = issues_here(issues, drivers, here.device)
    print("\n".join(_lines(here, size, cells, known, findings, whole=options.all)))
    failing = {"problem", "warning"} if options.strict else {"problem"}
    failed = any(finding.level in failing for finding in findings)
    print(_verdict(findings, failed=failed, strict=options.strict))
    return int(failed)


def _verdict(findings: Sequence[Finding], *, failed: bool, strict: bool) -> str:
    """Return the last line."""
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "warning", "note")}
    counted = ", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items())
    return f"verdict: {'FAIL' if failed else 'ok'}: {counted}{', --strict' if strict else ''}"


def _findings(here: Machine, wanted: int, cells: Sequence[Capability]) -> Iterator[Finding]:
    """Yield what is wrong with the packages and the machine, and whether GPUs or cells are missing."""
    yield from machine.package_findings()
    yield from machine.findings(here)
    if len(here.visible) < wanted:
        text = f"{wanted} GPUs are wanted, {len(here.visible)} of {len(here.gpus)} are visible"
        yield Finding("problem", text)
    if not any(one.able for one in cells):
        reasons = dict.fromkeys(reason for one in cells for reason in one.reasons.values() if reason)
        text = f"no cell can run here, so a suite fails: {'; '.join(list(reasons)[:3])}"
        yield Finding("problem", text)


def _lines(
    here: Machine,
    world_size: int,
    cells: Sequence[Capability],
    known: Sequence[tuple[KnownIssue, list[str]]],
    findings: Sequence[Finding],
    *,
    whole: bool,
) -> Iterator[str]:
    """Yield the lines for the terminal; ``whole``: with every reason and link."""
    yield "installed"
    yield f"  {', '.join(f'{name} {version}' for name, version in machine.installed().items())}"
    yield from (f"  {kind} {one}" for kind, origins in machine.extensions().items() for one in origins)
    yield from ("", "devices", *(f"  {line}" for line in _devices(here)), "")
    more = "" if whole else "; --all gives the reasons of the others"
    yield f"cells that can be run here, those without options one by one ({world_size} ranks, {here.device}){more}"
    yield from (f"  {line}" for one in cells for line in one.lines(whole=whole))
    listed = "" if whole or not known else " (--all lists them)"
    yield from ("", f"known upstream issues of these versions on {here.device}: {len(known)}{listed}")
    if whole:
        yield from (f"  {issue.id} ({', '.join(drivers)}): {issue.reason} ({issue.link})" for issue, drivers in known)
    yield ""
    yield from (f"{finding.level}: {finding.text}" for finding in findings)


def _devices(here: Machine) -> Iterator[str]:
    yield f"{here.cores} CPU cores; {len(here.gpus)} GPUs, {len(here.visible)} visible"
    torch = here.torch
    if "error" in torch:
        return
    names = f" ({', '.join(dict.fromkeys(torch['gpus']))})" if torch["gpus"] else ""
    built = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "the CPU only"
    yield f"torch is built for {built}; it can use {len(torch['gpus'])} GPUs{names}"
    nccl = f"NCCL {torch['nccl']}".strip() if torch["has_nccl"] else "no NCCL"
    yield f"ranks talk through {'gloo' if torch['gloo'] else 'no gloo'} on the CPU; for GPUs there is {nccl}"
    library = here.nccl
    if library is not None:
        sharing = "takes several ranks of one GPU" if library.shares_gpus else f"takes one rank a GPU. {CURE}"
        yield f"ranks load {library} ({library.path}), which {sharing}"
