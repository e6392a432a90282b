"""``trace``: trains one cell and prints what its ranks' probes recorded, without pytest."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.cli.output import named_in_errors, table
from pytest_distcompat.excerpt import visible
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.grouping import grouped

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.driver import Driver
    from pytest_distcompat.trace import RunTrace, Trace


def add(commands: Any) -> None:
    """Add the subcommand to the parser's."""
    trace = commands.add_parser(
        "trace",
        help="train one cell; show names, dtypes, placements",
        description="Train one cell, show what its ranks saw. Exit code 0: it trained and no check that was named fails; else 1.",
    )
    trace.add_argument("driver", metavar="DRIVER", help="torch, accelerate, trainer, deepspeed, or module:attribute")
    trace.add_argument("cell", metavar="CELL", help="as the matrix names it: fsdp2-bf16_upcast-w2-compile")
    trace.add_argument("--check", action="append", default=[], metavar="NAME", help="ask this check too")
    trace.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs, if there are enough"
    )
    trace.add_argument("--timeout", type=float, metavar="SECONDS", help="of a run (default: as --distcompat-timeout)")
    trace.add_argument("--keep", type=Path, metavar="DIRECTORY", help="leave checkpoints and logs there")
    trace.set_defaults(call=_trace, finds_drivers=True)


def _trace(options: argparse.Namespace) -> int:
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.checks import CHECKS
    from pytest_distcompat.drivers import find_driver
    from pytest_distcompat.launch.temporary import temporary_directory

    driver, cell = find_driver(options.driver), Cell.parse(options.cell)
    checks = [CHECKS.get(name) for name in options.check]
    if options.timeout is not None and not 0 < options.timeout < float("inf"):
        raise UsageProblem(f"--timeout {options.timeout:g} is not right: expected a number of seconds above 0")
    with contextlib.ExitStack() as end:
        store = options.keep or end.enter_context(temporary_directory())
        with named_in_errors(f"--keep {store}"):
            store.mkdir(parents=True, exist_ok=True)
        return _run(options, driver, cell, checks, store.resolve())


def _run(options: argparse.Namespace, driver: type[Driver], cell: Cell, checks: list[Any], store: Path) -> int:
    from pytest_distcompat.drivers import unsupported_reason
    from pytest_distcompat.engine import choose_device, local_runner, not_applicable, run_check
    from pytest_distcompat.known import applying, concerned, shipped
    from pytest_distcompat.launch.request import Request
    from pytest_distcompat.precisions import PRECISIONS
    from pytest_distcompat.scenario import TRAIN
    from pytest_distcompat.strategies import STRATEGIES

    STRATEGIES.get(cell.strategy)
    PRECISIONS.get(cell.precision)
    # As in the suite, which has no item for a check that is not applicable.
    reasons = {check.name: not_applicable(check, cell, driver, {}) for check in checks}
    scenarios = [TRAIN, *(check.runs(cell, driver) for check in checks if not reasons[check.name])]
    device = choose_device(
        options.device, max(run.cell(cell).world_size for scenario in scenarios for run in scenario.runs)
    )
    reason = unsupported_reason(driver, cell, device)
    if reason:
        raise UsageProblem(f"{cell.id}: {reason}")
    timeout = options.timeout or Request.timeout
    with local_runner(driver, [cell], device=device, timeout=timeout, store=store) as runner:
        # The results of an earlier command in that directory may be of an older trainer.
        for scenario in scenarios:
            runner.forget(options.driver, cell, scenario)
        trace = runner.trace(options.driver, cell, TRAIN)
        print("\n".join(map(visible, lines(cell, trace))))
        known = applying(shipped(), concerned(driver), device)
        passed = []
        for check in checks:
            if reasons[check.name]:
                print(f"\ncheck {check.name}: not applicable\n  {reasons[check.name]}")
                continue
            verdict = run_check(runner, options.driver, cell, check, known)[0]
            head = [f"\ncheck {verdict.check}: {verdict.status}", *([verdict.reason] if verdict.reason else [])]
            print("\n  ".join([*head, *map(visible, verdict.message.splitlines())]))
            # Whether a session would stay green with it.
            passed.append(not verdict.status.red)
    return int(trace.run().end is not None or not all(passed))


def lines(cell: Cell, trace: Trace) -> Iterator[str]:
    """Yield the lines about a training, as far as it got, and about its failure."""
    from pytest_distcompat.evidence.cells import add_training
    from pytest_distcompat.report.result import Row

    run, evidence = trace.run(), Row("", trace.driver, cell.id)
    add_training(evidence, run)
    yield f"{cell.id} (driver {trace.driver})"
    yield from _model(run)
    if evidence.names:
        local = _local(run)
        columns: dict[str, Callable[[dict[str, Any]], object]] = {
            "unwrapped name": lambda row: row["unwrapped"] or "none",
            "shape": lambda row: " x ".join(map(str, row["shape"])),
            "live name": lambda row: "=" if row["live"] == row["unwrapped"] else row["live"] or row.get("key", "none"),
            "loaded": lambda row: row["loaded"],
            "local dtype": lambda row: row["dtype"],
            "kind": lambda row: row["kind"],
            "placement": lambda row: row.get("placement", ""),
            "of each rank": lambda row: local.get(row["live"], ""),
            "held": lambda row: "flat" if row["held"] is None else row["held"],
            "files": lambda row: len(row["files"]),
        }
        yield from (
            "",
            "names and placements (= the unwrapped name; held: how often by the optimizer; files: how many have the name)",
        )
        yield from table([*columns], [[entry(row) for entry in columns.values()] for row in evidence.names])
    if evidence.dtypes:
        yield from ("", "dtypes after three steps")
        kinds = []
        for row in evidence.dtypes:
            differs = row["expected"] and row["seen"] != [row["expected"]]
            actual = ", ".join(row["seen"]) or "nothing"
            kinds.append((row["kind"], row["expected"] or "any", actual, "differs" if differs else ""))
        yield from table(("kind", "expected", "actual", ""), kinds)
    if evidence.steps.get("loss"):
        yield ""
        names = [name for name in ("loss", "grad_norm", "seconds") if name in evidence.steps]
        steps = zip(*(evidence.steps[name] for name in names), strict=True)
        yield from table(
            ("step", *names), [(n, *("" if v is None else v for v in step)) for n, step in enumerate(steps, 1)]
        )
    if run.end is not None:
        action = f" in {run.end.action}" if run.end.action else ""
        yield ""
        yield from f"{run.end.kind}{action}: {run.end.text}".split("\n")


def _model(run: RunTrace) -> Iterator[str]:
    """Yield the lines about the whole model and the optimizer."""
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
        kept_state = f"; keeps {', '.join(keys)}" if keys else ""
        entries = f"{optimizer.entries} entries on rank 0, {optimizer.foreign} foreign"
        yield f"  optimizer {' > '.join(optimizer.chain)}; {entries}{kept_state}"


def _local(run: RunTrace) -> dict[str, str]:
    """Return the elements that each rank stores of each live name: one number if all ranks store as many."""
    sizes = grouped((info.name, info.local_numel) for snapshot in run.at("build") for info in snapshot.parameters)
    return {name: str(found[0]) if len(set(found)) == 1 else "|".join(map(str, found)) for name, found in sizes.items()}
