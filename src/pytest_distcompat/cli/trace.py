"""``trace``: train one cell and show what its ranks' probes saw, as tables; without pytest."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.cli.drivers import named
from pytest_distcompat.cli.tables import table
from pytest_distcompat.excerpt import visible
from pytest_distcompat.failures import UsageProblem

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.driver import Driver
    from pytest_distcompat.judge import Verdict
    from pytest_distcompat.trace import RunTrace, Trace

#: Why a check that holds to a limit has nothing to say here.
_LIMIT = "a run of the suite is given its limit"


def add(commands: Any) -> None:
    """Add the subcommand to the parser's."""
    trace = commands.add_parser(
        "trace",
        help="train one cell; show names, dtypes, placements",
        description="Train one cell, show what its ranks saw. Exit code 0: it trained and no check that was named fails; else 1.",
    )
    trace.add_argument("driver", metavar="DRIVER", help="torch, accelerate, trainer, deepspeed, or module:attribute")
    trace.add_argument("cell", metavar="CELL", help="as the matrix names it: fsdp2-bf16_mixed-w2-compile")
    trace.add_argument("--check", action="append", default=[], metavar="NAME", help="ask this check too")
    trace.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs, if there are enough"
    )
    trace.add_argument("--timeout", type=float, metavar="SECONDS", help="of a run (default: as --distcompat-timeout)")
    trace.add_argument("--keep", type=Path, metavar="DIRECTORY", help="leave checkpoints and logs there")
    trace.set_defaults(call=_trace)


def _trace(told: argparse.Namespace) -> int:
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.checks import CHECKS

    driver = named(told.driver)
    try:
        cell = Cell.parse(told.cell)
    except ValueError as error:
        raise UsageProblem(str(error)) from None
    checks = [CHECKS.get(name) for name in told.check]
    if told.timeout is not None and not 0 < told.timeout < float("inf"):
        raise UsageProblem(f"--timeout {told.timeout:g} is not right: expected a number of seconds above 0")
    if told.keep is None:
        with tempfile.TemporaryDirectory(prefix="distcompat-trace-") as directory:
            return _traced(told, driver, cell, checks, Path(directory))
    try:
        told.keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageProblem(f"--keep {told.keep}: {error.strerror}") from None
    return _traced(told, driver, cell, checks, told.keep.resolve())


def _traced(told: argparse.Namespace, driver: type[Driver], cell: Cell, checks: list[Any], store: Path) -> int:
    from pytest_distcompat.drivers import preload_of
    from pytest_distcompat.drivers._declared import unsupported_reason
    from pytest_distcompat.judge import judge
    from pytest_distcompat.known import applying, concerned, shipped
    from pytest_distcompat.launch import WarmLauncher, Warmth
    from pytest_distcompat.launch.request import Request, import_path
    from pytest_distcompat.lease import Pool, cpu_slots, gpus
    from pytest_distcompat.leased import LeasedLauncher
    from pytest_distcompat.precisions import PRECISIONS
    from pytest_distcompat.runner import Runner
    from pytest_distcompat.scenario import TRAIN
    from pytest_distcompat.strategies import STRATEGIES

    STRATEGIES.get(cell.strategy)
    PRECISIONS.get(cell.precision)
    # Where the suite has no item, there is nothing to ask.
    blank = {check.name: check.not_applicable(cell, driver) or (_LIMIT if check.limit else "") for check in checks}
    scenarios = [TRAIN, *(check.runs(cell, driver) for check in checks if not blank[check.name])]
    most = max(run.cell(cell).world_size for scenario in scenarios for run in scenario.runs)
    device = _device(told.device, most)
    reason = unsupported_reason(driver, cell, device)
    if reason:
        raise UsageProblem(f"{cell.id}: {reason}")
    warmth = Warmth(preload_of(driver, [cell]), path=import_path())
    # Other runs of this user may be at work on the same devices.
    pool = Pool(None, gpus() if device == "cuda" else cpu_slots(), notify=_notice)
    launcher = LeasedLauncher(WarmLauncher(warmth, device=device), lambda: pool, _notice)
    runner = Runner(store, launcher, device=device, timeout=told.timeout or Request.timeout, notice=_notice)
    # What an earlier command kept there is of the trainer as it was then.
    for scenario in scenarios:
        runner.forget(told.driver, cell, scenario)
    try:
        trace = runner.trace(told.driver, cell, TRAIN)
        print("\n".join(map(visible, lines(cell, trace))))  # noqa: T201 - a command speaks
        known = applying(shipped(), concerned(driver), device)
        good = []
        for check in checks:
            if blank[check.name]:
                print(f"\ncheck {check.name}: blank\n  {blank[check.name]}")  # noqa: T201 - a command speaks
            else:
                found = runner.trace(told.driver, cell, check.runs(cell, driver))
                good.append(_tell(judge(check, cell, found, known)))
    finally:
        launcher.close()
    return int(trace.run().end is not None or not all(good))


def _device(asked: str, ranks: int) -> str:
    from pytest_distcompat.devices import visible_gpus

    if asked == "cpu":
        return "cpu"
    there = visible_gpus()
    if asked == "cuda" and there < ranks:
        raise UsageProblem(f"--device cuda: {ranks} ranks need {ranks} GPUs, {there} visible")
    return "cuda" if there >= ranks else "cpu"


def _notice(text: str) -> None:
    print(f"distcompat: {text}", file=sys.stderr)  # noqa: T201 - a command speaks


def _tell(verdict: Verdict) -> bool:
    """Print what a check says; whether it would leave a run green."""
    said = [f"\ncheck {verdict.check}: {verdict.status}", *([verdict.reason] if verdict.reason else [])]
    print("\n  ".join([*said, *map(visible, verdict.message.splitlines())]))  # noqa: T201 - a command speaks
    return verdict.ok or verdict.status == "known"


def lines(cell: Cell, trace: Trace) -> Iterator[str]:
    """Everything that a training showed, as far as it got; how it ended, if not well."""
    from pytest_distcompat.evidence import training

    run = trace.run()
    shown = training(cell, run)
    yield f"{cell.id} (driver {trace.driver})"
    yield from _model(run)
    if shown.names:
        local = _local(run)
        heads = (
            "unwrapped name",
            "shape",
            "live name",
            "loaded",
            "local dtype",
            "kind",
            "placement",
            "of each rank",
            "held",
            "files",
        )
        rows = [
            (
                row["unwrapped"] or "none",
                " x ".join(map(str, row["shape"])),
                "=" if row["live"] == row["unwrapped"] else row["live"] or row.get("key", "none"),
                row["loaded"],
                row["dtype"],
                row["kind"],
                row.get("placement", ""),
                local.get(row["live"], ""),
                "flat" if row["held"] is None else row["held"],
                len(row["files"]),
            )
            for row in shown.names
        ]
        yield from (
            "",
            "names and placements (= the unwrapped name; held: how often by the optimizer; files: how many have the name)",
        )
        yield from table(heads, rows)
    if shown.dtypes:
        yield from ("", "dtypes after three steps")
        seen = [(row, ", ".join(row["seen"]) or "nothing") for row in shown.dtypes]
        differs = ("" if not row["expected"] or row["seen"] == [row["expected"]] else "differs" for row, _ in seen)
        kinds = [
            (row["kind"], row["expected"] or "any", found, no) for (row, found), no in zip(seen, differs, strict=True)
        ]
        yield from table(("kind", "expected", "seen", ""), kinds)
    if shown.steps.get("loss"):
        yield ""
        names = [name for name in ("loss", "grad_norm", "seconds") if name in shown.steps]
        steps = zip(*(shown.steps[name] for name in names), strict=True)
        yield from table(
            ("step", *names), [(n, *("" if v is None else v for v in step)) for n, step in enumerate(steps, 1)]
        )
    if run.end is not None:
        yield from ("", f"{run.end.kind}{f' in {run.end.action}' if run.end.action else ''}: {run.end.text}")


def _model(run: RunTrace) -> Iterator[str]:
    """The lines about the whole model and the optimizer."""
    built = run.first("build")
    if built is None or built.model is None:
        return
    model = built.model
    wraps = ", ".join(f"{count} x {name}" for name, count in model.wrappers.items()) or "none"
    stage = "" if model.zero_stage is None else f", ZeRO stage {model.zero_stage}"
    yield f"  model {model.type}; wrappers {wraps}{stage}; {model.world_size} ranks over {model.backend or 'no group'}"
    stepped = run.first("step")
    if stepped is not None and stepped.optimizer is not None:
        optimizer = stepped.optimizer
        keys = dict.fromkeys(f"{state.key} {state.dtype}" for state in (*optimizer.masters, *optimizer.states))
        told = f"; keeps {', '.join(keys)}" if keys else ""
        entries = f"{optimizer.entries} entries on rank 0, {optimizer.foreign} foreign"
        yield f"  optimizer {' > '.join(optimizer.chain)}; {entries}{told}"


def _local(run: RunTrace) -> dict[str, str]:
    """Live name to how many elements each rank stores: one number where all store as many."""
    sizes: dict[str, list[int]] = {}
    for snapshot in run.at("build"):
        for info in snapshot.model.parameters if snapshot.model else ():
            sizes.setdefault(info.name, []).append(info.local_numel)
    return {name: str(found[0]) if len(set(found)) == 1 else "|".join(map(str, found)) for name, found in sizes.items()}
