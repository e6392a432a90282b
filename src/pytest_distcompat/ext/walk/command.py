"""The command ``distcompat walk``: call a live trainer in random order, compare with one process.

A *walk* is a sequence of calls, such as ``step(), micro(), save()``. Without ``--calls`` the
command replays the *corpus*, walks that failed once, and draws new ones. With it the command runs
that walk alone. It prints a line for each walk, ``ok: ...`` or ``FAIL: ...`` with the findings,
then the shortest walk that fails. The command line calls ``add`` by the entry point group
``pytest_distcompat.commands``, and ``_walk`` with the parsed options; the exit code is 1 if a walk
failed. The walks are run by an ``Explorer`` (``explore``), which keeps those that failed.

A *driver* is the class that builds and calls a trainer, such as ``torch``; its class of calls
(``live_calls``) has a method for each call. A call is *refused* if the driver does not have it
under the strategy. A *cell* is what it runs in: strategy, precision, number of ranks and options,
such as ``fsdp2-fp32-w2-model_mlp``.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.failures import UsageProblem

if TYPE_CHECKING:
    from pytest_distcompat.calls import Call
    from pytest_distcompat.driver import Driver
    from pytest_distcompat.drivers import Calls
    from pytest_distcompat.ext.walk.explore import Explorer
    from pytest_distcompat.ext.walk.sequence import Walk


def add(commands: Any) -> None:
    """Add the subcommand ``walk`` to those of the parser, as ``add_subparsers`` returned them."""
    parser = commands.add_parser(
        "walk",
        help="call a live trainer in drawn sequences, compare with one process",
        description="Replay the walks that failed once, then draw new ones; "
        "shrink the first that fails. Exit code 1: one fails.",
    )
    parser.add_argument(
        "--driver", default="torch", metavar="DRIVER", help="a driver with calls (default: torch)"
    )
    parser.add_argument("--strategy", default="fsdp2", help="the strategy (default: fsdp2)")
    parser.add_argument(
        "--cell",
        metavar="CELL",
        help="instead of a strategy, a cell with model_mlp, as the matrix names it",
    )
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N", help="calls of a walk at most (default: 10)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="of what is drawn (default: another one each time; it is printed)",
    )
    parser.add_argument(
        "--examples", type=int, default=20, metavar="N", help="walks to draw (default: 20)"
    )
    parser.add_argument(
        "--calls", metavar="CALLS", help="this walk alone: \"step(), micro(), step(clip='no')\""
    )
    parser.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="write a script that shows the failure without the plugin",
    )
    # ``finds_drivers``: a driver may be a module in the working directory.
    parser.set_defaults(call=_walk, finds_drivers=True)


def _named(
    text: str, kind: type[Calls], reasons: Mapping[Call, str]
) -> tuple[list[Call], list[Call]]:
    """Return the calls of ``--calls`` that can be made, then those that are refused.

    Args:
        text: The option's value: ``step(), micro(), step(clip='no')``.
        kind: The driver's class of calls. ``kind.own`` names those that the trainer makes itself in
            a loop of its own, after which alone it saves.
        reasons: The calls that are refused -> why.

    Raises:
        UsageProblem: The driver cannot do this walk.
    """
    from pytest_distcompat.calls import read_calls
    from pytest_distcompat.ext.walk.sequence import valid

    try:
        named = read_calls(text, kind)
    except ValueError as error:
        raise UsageProblem(f"--calls: {error}") from None
    if not named:
        raise UsageProblem("--calls: no call is given")
    calls: list[Call] = []
    # A dict, because it keeps the order and has each call only once.
    refused_calls: dict[Call, str] = {}
    for call in named:
        if call in reasons:
            refused_calls[call] = reasons[call]
        else:
            calls.append(call)
    if not calls:
        refusals = [f"{call}: {reason}" for call, reason in refused_calls.items()]
        raise UsageProblem(f"--calls {text}: no call is left: {'; '.join(refusals)}")
    if not valid(calls, kind.own):
        raise UsageProblem(f"--calls {text}: a call may not follow those before it")
    return calls, list(refused_calls)


def _walk(options: argparse.Namespace) -> int:
    """Run walks as the options say; return 1 if any failed, else 0."""
    from pytest_distcompat.calls import refused
    from pytest_distcompat.drivers import find_driver, unsupported_reason
    from pytest_distcompat.engine import local_runner
    from pytest_distcompat.ext.walk.explore import Explorer

    driver = find_driver(options.driver)
    cell = Cell.parse(options.cell or f"{options.strategy}-fp32-w2-model_mlp")
    reason = unsupported_reason(driver, cell, "cpu")
    if not reason and not driver.live_calls:
        reason = "it declares no calls"
    if reason:
        raise UsageProblem(f"{options.driver} in {cell}: {reason}")
    seed = options.seed
    if seed is None:
        seed = secrets.randbelow(2**31)
    reasons = refused(driver.live_calls, cell.strategy)
    calls: list[Call] = []
    refused_calls: list[Call] = []
    if options.calls is not None:
        calls, refused_calls = _named(options.calls, driver.live_calls, reasons)

    def note(walk: Walk, wrong: Sequence[str]) -> None:
        """Print a walk that has run, and what is wrong with it."""
        word = "FAIL" if wrong else "ok"
        print(f"{word}: {walk}", *wrong, sep="\n     ", flush=True)

    with local_runner(driver, [cell], device="cpu", timeout=60) as runner:
        explorer = Explorer(runner, options.driver, cell, note)
        if calls:
            for call in refused_calls:
                print(f"passed over: {call}: {reasons[call]}")
            explorer.check(calls)
        else:
            # The command that draws the same walks again.
            print(f"distcompat walk --driver {options.driver} --cell {cell} --seed {seed}")
            for call, why in reasons.items():
                print(f"refused: {call}: {why}")
            explorer.explore(options.examples, seed, options.steps)
    if not explorer.failed:
        return 0
    _print_shortest(explorer, driver, options.script)
    return 1


def _print_shortest(explorer: Explorer, driver: type[Driver], script_file: Path | None) -> None:
    """Print the shortest walk that fails, preferably one that is not in the corpus.

    Args:
        explorer: What has run the walks.
        driver: The driver's class.
        script_file: Where to write a script that shows the failure; None for nowhere. None is
            written if the driver has none for the strategy.
    """
    from pytest_distcompat.ext.walk.script import script
    from pytest_distcompat.ext.walk.sequence import Walk

    # The calls of each walk of the corpus, without the entry's other fields.
    replayed = {calls for calls, _ in explorer.corpus()}

    def new_and_short_first(calls: tuple[Call, ...]) -> tuple[bool, int]:
        """Return the sort key of a walk: False, for a new one, sorts first."""
        return calls in replayed, len(calls)

    shortest = min(explorer.failed, key=new_and_short_first)
    wrong = explorer.failed[shortest]
    walk = Walk(shortest, driver.live_calls)
    print(f"\n{walk}:", *wrong, sep="\n  ")
    text = script(explorer.cell, walk, "\n".join(wrong))
    if script_file and text:
        script_file.write_text(text, encoding="utf-8")
        print(f"torchrun --nproc-per-node {explorer.cell.world_size} {script_file}")
