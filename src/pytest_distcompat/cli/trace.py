"""``distcompat trace``: trains one cell and prints what its ranks recorded, without pytest.

For example ``distcompat trace accelerate fsdp2-fp32-w2 --check names``:

- A *driver* is the trainer under test, here the built-in one for accelerate.
- A *cell* is a configuration of it: strategy, precision, 2 ranks, and perhaps options.
- *Ranks* are the processes of the process group that trains. After each action of a training, as
  ``build``, ``step`` and ``save``, the *probe* of a rank records a snapshot of model and optimizer.
  All snapshots of a process group from start to end are a ``RunTrace``.
- A *check* is a claim about a cell. Its *verdict* is passed, failed, crashed and so on.

``cli.main`` calls ``add`` for the parser, and then ``_trace`` with the parsed arguments. The
printed tables come from the same *evidence* as those of the HTML report: a ``Row`` that
``evidence.cells.add_training`` fills in.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.cli.output import named_in_errors, table
from pytest_distcompat.excerpt import visible
from pytest_distcompat.failures import UsageProblem

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.driver import Driver
    from pytest_distcompat.report.result import Row
    from pytest_distcompat.scenario import Scenario
    from pytest_distcompat.status import Verdict
    from pytest_distcompat.trace import RunTrace, Trace

#: Makes the value of a table's column from an entry of ``Row.names``. Each is about a parameter:
#: ``{"unwrapped": "layer.weight", "live": "module.layer.weight", "shape": [8, 4], "loaded":
#: "float32", "dtype": "float32", "kind": "Tensor", "held": 1, "files": [...], ...}``.
Column = Callable[[dict[str, Any]], object]


def add(commands: Any) -> None:
    """Add the subcommand; ``commands`` is what argparse's ``add_subparsers`` returned."""
    trace = commands.add_parser(
        "trace",
        help="train one cell; show names, dtypes, placements",
        description="Train one cell, show what its ranks saw. "
        "Exit code 0: it trained and no check that was named fails; else 1.",
    )
    trace.add_argument(
        "driver",
        metavar="DRIVER",
        help="torch, accelerate, trainer, deepspeed, or module:attribute",
    )
    trace.add_argument(
        "cell", metavar="CELL", help="as the matrix names it: fsdp2-bf16_upcast-w2-compile"
    )
    trace.add_argument(
        "--check", action="append", default=[], metavar="NAME", help="ask this check too"
    )
    trace.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: GPUs, if there are enough",
    )
    trace.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="of a run (default: as --distcompat-timeout)",
    )
    trace.add_argument(
        "--keep", type=Path, metavar="DIRECTORY", help="leave checkpoints and logs there"
    )
    trace.set_defaults(call=_trace, finds_drivers=True)


def _trace(options: argparse.Namespace) -> int:
    """Run the subcommand: check its arguments, and make the directory of the runs.

    Returns:
        The exit code.
    """
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.checks import CHECKS
    from pytest_distcompat.drivers import find_driver
    from pytest_distcompat.launch.temporary import temporary_directory

    driver = find_driver(options.driver)
    cell = Cell.parse(options.cell)
    checks = [CHECKS.get(name) for name in options.check]
    if options.timeout is not None and not 0 < options.timeout < float("inf"):
        raise UsageProblem(
            f"--timeout {options.timeout:g} is not right: expected a number of seconds above 0"
        )
    with contextlib.ExitStack() as end:
        store = options.keep or end.enter_context(temporary_directory())
        with named_in_errors(f"--keep {store}"):
            store.mkdir(parents=True, exist_ok=True)
        return _run(options, driver, cell, checks, store.resolve())


def _run(
    options: argparse.Namespace, driver: type[Driver], cell: Cell, checks: list[Any], store: Path
) -> int:
    """Train the cell, run the checks, and print what both say.

    Args:
        options: The parsed arguments.
        driver: The driver.
        cell: The cell.
        checks: The checks that the user has named.
        store: The directory for the files of all runs. With ``--keep`` an earlier command may have
            used it.

    Returns:
        1 if the training ended early or a check fails, else 0.
    """
    from pytest_distcompat.drivers import unsupported_reason
    from pytest_distcompat.engine import choose_device, local_runner, not_applicable, run_check
    from pytest_distcompat.known import applying, names_in_issues, shipped
    from pytest_distcompat.launch.request import Request
    from pytest_distcompat.precisions import PRECISIONS
    from pytest_distcompat.scenario import TRAIN
    from pytest_distcompat.strategies import STRATEGIES

    # Each raises UsageProblem for a name that does not exist.
    STRATEGIES.get(cell.strategy)
    PRECISIONS.get(cell.precision)
    # Name of a check -> why it is not applicable to the cell; None if it is. Such a check does not
    # run, as in a suite, which has no item for it.
    reasons = {}
    # The lists of runs that the training and the checks need.
    scenarios = [TRAIN]
    for check in checks:
        reason = not_applicable(check, cell, driver, {})
        reasons[check.name] = reason
        if not reason:
            scenarios.append(check.runs(cell, driver))
    device = choose_device(options.device, _largest_world_size(cell, scenarios))
    reason = unsupported_reason(driver, cell, device)
    if reason:
        raise UsageProblem(f"{cell.id}: {reason}")
    timeout = options.timeout or Request.timeout
    with local_runner(driver, [cell], device=device, timeout=timeout, store=store) as runner:
        # The runner does not repeat a run that the directory has. With ``--keep`` it may be one of
        # an older trainer, so all are forgotten first.
        for scenario in scenarios:
            runner.forget(options.driver, cell, scenario)
        trace = runner.trace(options.driver, cell, TRAIN)
        for line in lines(cell, trace):
            print(visible(line))
        # What is expected to fail: of the known issues that this package brings, those that concern
        # the driver with its installed libraries on this device.
        known = applying(shipped(), names_in_issues(driver), device)
        # Whether a session would stay green with each check.
        green: list[bool] = []
        for check in checks:
            reason = reasons[check.name]
            if reason:
                print(f"\ncheck {check.name}: not applicable\n  {reason}")
                continue
            verdict, _ = run_check(runner, options.driver, cell, check, known)
            _print_verdict(verdict)
            green.append(not verdict.status.red)
    # ``end`` says how the run of the training failed; None if it did not.
    ended_early = trace.run().end is not None
    return int(ended_early or not all(green))


def _largest_world_size(cell: Cell, scenarios: Iterable[Scenario]) -> int:
    """Return how many ranks the largest run of these scenarios has in the cell."""
    largest = 0
    for scenario in scenarios:
        for run in scenario.runs:
            largest = max(largest, run.cell(cell).world_size)
    return largest


def _print_verdict(verdict: Verdict) -> None:
    """Print the status of a check, and below it the verdict's reason and message."""
    print(f"\ncheck {verdict.check}: {verdict.status}")
    if verdict.reason:
        print(f"  {verdict.reason}")
    for line in verdict.message.splitlines():
        print(f"  {visible(line)}")


def lines(cell: Cell, trace: Trace) -> Iterator[str]:
    """Yield the lines about a training, as far as it got, and about its failure.

    Args:
        cell: The cell.
        trace: The trace of its training, which has a single run.
    """
    from pytest_distcompat.evidence.cells import add_training
    from pytest_distcompat.report.result import Row

    run = trace.run()
    evidence = Row("", trace.driver, cell.id)
    add_training(evidence, run)
    yield f"{cell.id} (driver {trace.driver})"
    yield from _model(run)
    if evidence.names:
        yield ""
        yield from _names(run, evidence)
    if evidence.dtypes:
        yield ""
        yield from _dtypes(evidence)
    if evidence.steps.get("loss"):
        yield ""
        yield from _steps(evidence)
    end = run.end
    if end is not None:
        place = f" in {end.action}" if end.action else ""
        text = f"{end.kind}{place}: {end.text}"
        yield ""
        yield from text.split("\n")


def _names(run: RunTrace, evidence: Row) -> Iterator[str]:
    """Yield a table of the parameters and buffers: their names, dtypes and placements.

    A parameter has a name in the unwrapped model, before any strategy wraps it
    (``layer.weight``), and one in the live model (``module.layer.weight`` under DDP).
    """
    stored_by_name = _stored_elements(run)
    # Head of a column -> function of an entry of the evidence.
    columns: dict[str, Column] = {
        "unwrapped name": lambda row: row["unwrapped"] or "none",
        "shape": lambda row: " x ".join(map(str, row["shape"])),
        "live name": _live_name,
        "loaded": lambda row: row["loaded"],
        "local dtype": lambda row: row["dtype"],
        "kind": lambda row: row["kind"],
        "placement": lambda row: row.get("placement", ""),
        "of each rank": lambda row: stored_by_name.get(row["live"], ""),
        "held": _held,
        "files": lambda row: len(row["files"]),
    }
    rows: list[list[object]] = []
    for row in evidence.names:
        rows.append([column(row) for column in columns.values()])
    yield (
        "names and placements (= the unwrapped name; "
        "held: how often by the optimizer; files: how many have the name)"
    )
    yield from table([*columns], rows)


def _held(row: Mapping[str, Any]) -> object:
    """Return how often a parameter is in the optimizer's param groups: 1, or 0 for never.

    It is ``flat`` where the optimizer has copies of flattened tensors instead, as under ZeRO.
    """
    if row["held"] is None:
        return "flat"
    return row["held"]


def _live_name(row: Mapping[str, Any]) -> object:
    """Return the live name of a parameter, ``=`` if it is the unwrapped name.

    For a tensor that only files have, it is its key there.
    """
    if row["live"] == row["unwrapped"]:
        return "="
    return row["live"] or row.get("key", "none")


def _dtypes(evidence: Row) -> Iterator[str]:
    """Yield a table of the expected and the actual dtypes of each kind of tensor."""
    rows: list[tuple[object, ...]] = []
    for row in evidence.dtypes:
        differs = row["expected"] and row["seen"] != [row["expected"]]
        actual = ", ".join(row["seen"]) or "nothing"
        note = "differs" if differs else ""
        rows.append((row["kind"], row["expected"] or "any", actual, note))
    yield "dtypes after three steps"
    yield from table(("kind", "expected", "actual", ""), rows)


def _steps(evidence: Row) -> Iterator[str]:
    """Yield a table with a row for each optimizer step: loss, gradient norm and seconds."""
    names = []
    for name in ("loss", "grad_norm", "seconds"):
        if name in evidence.steps:
            names.append(name)
    rows: list[list[object]] = []
    for nth in range(len(evidence.steps["loss"])):
        row: list[object] = [nth + 1]
        for name in names:
            value: object = evidence.steps[name][nth]
            # A number that was not recorded is an empty place of the table.
            if value is None:
                value = ""
            row.append(value)
        rows.append(row)
    yield from table(("step", *names), rows)


def _model(run: RunTrace) -> Iterator[str]:
    """Yield the lines about the whole model and the optimizer.

    An entry of the optimizer is a tensor in its param groups; a *foreign* one is no parameter of
    the live model.
    """
    # The snapshot of the lowest rank after the trainer has wrapped the model; None if none got
    # there.
    built = run.first("build")
    if built is None or built.model is None:
        return
    model = built.model
    counts = []
    for name, count in model.wrappers.items():
        counts.append(f"{count} x {name}")
    wrappers = ", ".join(counts) or "none"
    stage = "" if model.zero_stage is None else f", ZeRO stage {model.zero_stage}"
    group = f"{model.world_size} ranks over {model.backend or 'no group'}"
    yield f"  model {model.type}; wrappers {wrappers}{stage}; {group}"
    stepped = run.first("step")
    if stepped is not None and stepped.optimizer is not None:
        optimizer = stepped.optimizer
        # A dictionary, to have each key once and in order.
        keys: dict[str, None] = {}
        for state in (*optimizer.masters, *optimizer.states):
            keys[f"{state.key} {state.dtype}"] = None
        kept_state = f"; keeps {', '.join(keys)}" if keys else ""
        entries = f"{optimizer.entries} entries on rank 0, {optimizer.foreign} foreign"
        chain = " > ".join(optimizer.chain)
        yield f"  optimizer {chain}; {entries}{kept_state}"


def _stored_elements(run: RunTrace) -> dict[str, str]:
    """Return live name -> the number of elements that each rank stores of it, as text.

    ``64|64|0`` is 64 on ranks 0 and 1 and none on rank 2. It is one number if all ranks store as
    many.
    """
    numels_by_name: dict[str, list[int]] = {}
    for snapshot in run.at("build"):
        for info in snapshot.parameters:
            numels_by_name.setdefault(info.name, []).append(info.local_numel)
    texts: dict[str, str] = {}
    for name, numels in numels_by_name.items():
        if len(set(numels)) == 1:
            texts[name] = str(numels[0])
        else:
            texts[name] = "|".join(str(numel) for numel in numels)
    return texts
