"""Engine: run cells of a driver and judge them, without pytest.

A *driver* is the trainer under test, as a class with a few methods. A *cell* is one point of the
matrix, such as ``fsdp2-fp32-w2``. A *check* is one claim about a cell, such as ``names`` or
``resume``. ``check_driver`` is a public function for programs and notebooks, and pytest's plugin
and the command use its parts (``run_check``, ``not_applicable``) too.

For each check in each cell a ``Runner`` has ranks perform the runs that the check needs, which
gives a ``Trace`` of what they recorded. ``judge`` compares the check's findings in the trace with
what is expected to fail. The result is a ``Verdict``: ``passed``, ``failed``, ``known``, ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_distcompat.cell import Cell, Matrix
from pytest_distcompat.checks import CHECKS, Check, find_check
from pytest_distcompat.devices import CPU_WORLD_SIZE, visible_gpus
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import find_driver, preload_of, unsupported_reason
from pytest_distcompat.expect import Expectation
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.judge import judge, skipped
from pytest_distcompat.known import applying, names_in_issues, shipped
from pytest_distcompat.launch.request import Request, Warmth, import_path
from pytest_distcompat.launch.temporary import temporary_directory
from pytest_distcompat.launch.warm import WarmLauncher
from pytest_distcompat.lease import Pool, cpu_slots, gpus
from pytest_distcompat.leased import LeasedLauncher
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.runner import Runner
from pytest_distcompat.status import Verdict
from pytest_distcompat.strategies import STRATEGIES

if TYPE_CHECKING:
    from pytest_distcompat.trace import Trace


def check_driver(
    driver: str | type[Driver],
    cells: str | Cell | Matrix | Iterable[str | Cell],
    checks: Iterable[str] | None = None,
    *,
    expect: Sequence[Expectation] = (),
    device: str = "auto",
    timeout: float = Request.timeout,
    limits: Mapping[str, float] | None = None,
    store: Path | None = None,
) -> list[Verdict]:
    """Run checks of a driver in every cell, on ranks of this machine, and return their verdicts.

    A program that calls this needs the guard ``if __name__ == "__main__":``, as for
    ``multiprocessing``.

    Args:
        driver: A built-in driver's name, ``"module:attribute"``, or a subclass of Driver that ranks
            can import.
        cells: Cells or their ids, like ``"fsdp2-bf16_upcast-w2"``, or a Matrix.
        checks: Names of checks. By default all that apply to a cell.
        expect: What does not hold, as in ``CompatSuite.expect``. Known upstream issues are added.
        device: ``"cuda"``, ``"cpu"``, or ``"auto"`` for GPUs if there are enough for the largest
            cell.
        timeout: The time limit of a run in seconds.
        limits: Limits of measured numbers, by the name of their check: ``{"throughput": 0.9}``.
        store: A directory for checkpoints and logs. Runs that it already holds are not run again.
            By default a temporary one.

    Returns:
        A verdict for each check in each cell, in this order. A cell that the driver or the machine
        cannot run has one verdict, ``skipped``, with the reason; so has a check in ``checks`` that
        does not apply to a cell.

    Raises:
        UsageProblem: If a name is unknown, there is no cell, a cell is over several machines, or
            ranks could not import the driver.

    Example:
        >>> from pytest_distcompat import check_driver
        >>> verdicts = check_driver(
        ...     "torch", "fsdp2-fp32-w2-model_mlp", ["names", "resume"], device="cpu"
        ... )
        >>> for verdict in verdicts:
        ...     print(verdict.check, verdict.status)
        names passed
        resume passed

    """
    # Mistakes of the caller are found first, before any process starts.
    name = _importable(driver)
    driver_class = find_driver(name)
    limits = dict(limits or {})
    chosen_checks = _checks(checks)
    chosen_cells = _cells(cells, device)
    if not chosen_cells:
        raise UsageProblem(f"cells={cells!r:.200}: expected at least one cell")
    for cell in chosen_cells:
        STRATEGIES.get(cell.strategy)
        PRECISIONS.get(cell.precision)
    reasons: dict[tuple[Cell, Check], str | None] = {}
    for cell in chosen_cells:
        for check in chosen_checks:
            reasons[cell, check] = not_applicable(check, cell, driver_class, limits)
    device = choose_device(device, _most_ranks(reasons, driver_class))
    # Beside the caller's expectations those of shipped known issues that concern this driver.
    known = applying(shipped(), names_in_issues(driver_class), device)
    expectations = (*expect, *known)
    verdicts: list[Verdict] = []
    with local_runner(
        driver_class, chosen_cells, device=device, timeout=timeout, limits=limits, store=store
    ) as runner:
        for cell in chosen_cells:
            unsupported = unsupported_reason(driver_class, cell, device)
            if unsupported:
                # One verdict for the whole cell, under the name of the first check.
                verdicts.append(skipped(chosen_checks[0].name, cell, unsupported))
                continue
            for check in chosen_checks:
                reason = reasons[cell, check]
                if not reason:
                    verdict, _ = run_check(runner, name, cell, check, expectations)
                    verdicts.append(verdict)
                elif checks is not None:
                    # Only a check that the caller named has a verdict that says why it does not
                    # apply.
                    verdicts.append(skipped(check.name, cell, reason))
    return verdicts


def _checks(names: Iterable[str] | None) -> list[Check]:
    """Return the checks of these names; all checks for None or no names.

    Raises UsageProblem for an unknown name.
    """
    if isinstance(names, str):
        names = [names]
    return [find_check(name) for name in names or CHECKS.names()]


def _most_ranks(reasons: Mapping[tuple[Cell, Check], str | None], driver: type[Driver]) -> int:
    """Return the number of ranks of the largest run of all checks that apply, at least 1.

    Args:
        reasons: Why a check has no verdict in a cell; None if it applies.
        driver: The driver.
    """
    most = 1
    for (cell, check), reason in reasons.items():
        if not reason:
            for run in check.runs(cell, driver).runs:
                most = max(most, run.cell(cell).world_size)
    return most


def run_check(
    runner: Runner, driver: str, cell: Cell, check: Check, expectations: Iterable[Expectation]
) -> tuple[Verdict, Trace]:
    """Run what a check needs in a cell; return its verdict and the trace that it was judged on.

    Args:
        runner: Has ranks perform the runs.
        driver: The driver's name, or ``module:attribute``.
        cell: The cell.
        check: The check.
        expectations: What is expected to fail, declared by the user or known upstream.
    """
    execution = check.execute(runner, driver, find_driver(driver), cell)
    if execution.may_pass:
        # The runs left out what is known to fail, so a pass does not show that it is fixed.
        expectations = [
            dataclasses.replace(expectation, strict=False) for expectation in expectations
        ]
    verdict = judge(check, cell, execution.trace, expectations)
    return dataclasses.replace(verdict, seed=execution.seed), execution.trace


def not_applicable(
    check: Check, cell: Cell, driver: type[Driver], limits: Mapping[str, float]
) -> str | None:
    """Return why a check has no verdict in a cell; None if it has one.

    ``limits`` are the user's limits of measured numbers: ``{"throughput": 0.9}``. A check of such a
    number claims nothing without one.
    """
    if check.limit and check.limit not in limits:
        return f"no limit was given: --distcompat-{check.limit}"
    return check.not_applicable(cell, driver)


@contextlib.contextmanager
def local_runner(
    driver: type[Driver],
    cells: Iterable[Cell],
    *,
    device: str,
    timeout: float = Request.timeout,
    limits: Mapping[str, float] | None = None,
    store: Path | None = None,
) -> Iterator[Runner]:
    """Yield a runner on warm ranks of this machine, on leased devices.

    Its processes are ended afterwards. The fork servers import what the driver and the cells'
    models need. Without ``store`` the runs' directory is temporary. Raises UsageProblem for a cell
    whose ranks are not all on this machine.
    """
    cells = tuple(cells)
    for cell in cells:
        if not cell.spread.on_one:
            raise UsageProblem(
                f"cell {cell}: only pytest runs cells over several nodes (--distcompat-nodes)"
            )
    with contextlib.ExitStack() as stack:
        if store is None:
            store = stack.enter_context(temporary_directory())
        inventory = gpus() if device == "cuda" else cpu_slots()
        # Other sessions of this user may use the same devices.
        pool = Pool(None, inventory, notify=_print_notice)
        warmth = Warmth(preload_of(driver, cells), path=import_path())
        launcher = LeasedLauncher(WarmLauncher(warmth, device=device), lambda: pool, _print_notice)
        stack.callback(launcher.close)
        yield Runner(
            store, launcher, device=device, timeout=timeout, notice=_print_notice, limits=limits
        )


def choose_device(option: str, ranks: int) -> str:
    """Return the device to run on: ``"cuda"`` or ``"cpu"``.

    For ``"auto"`` it is GPUs, if there are enough for the ``ranks`` of the largest run. Raises
    UsageProblem if GPUs are wanted and there are fewer than ranks, or for an unknown option.
    """
    if option not in {"auto", "cuda", "cpu"}:
        raise UsageProblem(f"device {option!r} is not right: expected auto, cuda or cpu")
    if option == "cpu":
        return "cpu"
    gpu_count = visible_gpus()
    if option == "cuda" and gpu_count < ranks:
        raise UsageProblem(f"device cuda: {ranks} ranks need {ranks} GPUs, {gpu_count} visible")
    return "cuda" if gpu_count >= ranks else "cpu"


def _print_notice(text: str) -> None:
    """Print what the user should know to stderr."""
    print(f"distcompat: {text}", file=sys.stderr)  # noqa: T201 - there is no pytest whose warnings could hold it


def _importable(driver: str | type[Driver]) -> str:
    """Return the name by which ranks find a driver.

    Raises UsageProblem for a class that they could not import.
    """
    if isinstance(driver, str):
        return driver
    if driver.__module__ == "__main__" or "." in driver.__qualname__:
        raise UsageProblem(
            f"driver {driver.__qualname__} is defined in {driver.__module__}: "
            "ranks could not import it; expected a class at the top level of a module"
        )
    return f"{driver.__module__}:{driver.__qualname__}"


def _cells(cells: str | Cell | Matrix | Iterable[str | Cell], device: str) -> list[Cell]:
    """Return the cells, each once, in their order.

    Those of a matrix that names no world size are on all visible GPUs, or without any on the CPU's
    default world size.
    """
    if isinstance(cells, Matrix):
        world_size = CPU_WORLD_SIZE
        if device != "cpu":
            world_size = visible_gpus() or CPU_WORLD_SIZE
        return list(cells.cells(STRATEGIES.names(), PRECISIONS.names(), world_size))
    if isinstance(cells, (str, Cell)):
        cells = [cells]
    distinct: dict[Cell, None] = {}
    for cell in cells:
        parsed = cell if isinstance(cell, Cell) else Cell.parse(cell)
        distinct[parsed] = None
    return list(distinct)
