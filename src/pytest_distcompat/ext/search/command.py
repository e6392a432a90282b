"""The command ``distcompat search``: look for branches of the stack that no cell reaches.

The *stack* is torch and the libraries above it. A *candidate* is a cell of a driver (one point of
the test matrix: ``fsdp2-fp32-w2-model_mlp``), and perhaps calls of the live trainer (``step(),
export(max_shard_size=7)``). The command tries candidates for a while, prints a line for each, and
keeps those that reach new branches. A branch is new if neither the map (``--map``, written by
``--distcompat-reach``) nor an earlier candidate has it.

``cli`` calls ``add``, by the entry point ``pytest_distcompat.commands``, and then ``_search`` with
the parsed options. Its return value is the exit code: 1 if a candidate breaks the *law*. By the law
the checks of a candidate pass and its calls do what they do in one process, or the stack refuses it
with a message (``trial``).

This file has the options and the output; ``guide`` has the search itself.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.cell import Cell
from pytest_distcompat.cli.output import named_in_errors
from pytest_distcompat.ext.search.candidate import Candidate, parse_calls
from pytest_distcompat.ext.search.guide import Search, Step
from pytest_distcompat.ext.search.reached import Reached, read_reached
from pytest_distcompat.ext.search.space import DriverSpace
from pytest_distcompat.ext.search.state import State, corpus_text, read_corpus, smallest_cover
from pytest_distcompat.ext.search.trial import Trials
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.installed import versions

#: The candidates that come with this package. They have reached new branches in earlier searches,
#: and a search begins with them.
CORPUS = Path(__file__).with_name("corpus.json")
_SECONDS_BY_UNIT = {"s": 1, "m": 60, "h": 3600}


def add(commands: Any) -> None:
    """Add the subcommand ``search`` to ``commands``, the result of ``add_subparsers``."""
    parser = commands.add_parser(
        "search",
        help="look for branches of the stack that no cell reaches, and judge what reaches them",
        description="Try settings, options and calls with arguments; "
        "keep what reaches branches that no cell of the map reaches, and vary it. "
        "Exit code 1: something breaks the law.",
    )
    parser.add_argument(
        "--map",
        type=Path,
        metavar="FILE",
        help="a map of --distcompat-reach: what it has is not new",
    )
    parser.add_argument(
        "--driver",
        action="append",
        metavar="NAME",
        help="only of this driver (default: all built-in ones)",
    )
    parser.add_argument(
        "--strategy",
        action="append",
        metavar="NAME",
        help="only under this strategy (default: all)",
    )
    parser.add_argument(
        "--candidates", type=int, metavar="N", help="try so many (default: 100, without --budget)"
    )
    parser.add_argument("--budget", metavar="TIME", help="begin none after so long: 90s, 20m, 2h")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of what is drawn (default: 0)"
    )
    parser.add_argument(
        "--shard",
        default="1/1",
        metavar="I/N",
        help="one of several searches that draw differently",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="go on from this file, and keep it after each candidate",
    )
    parser.add_argument(
        "--add",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="add the state of another shard",
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        default=CORPUS,
        metavar="FILE",
        help="what to begin with (default: the package's)",
    )
    parser.add_argument(
        "--blind", action="store_true", help="draw all alike, without a corpus: for comparison"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the corpus of what reached something new",
    )
    parser.add_argument("--cell", metavar="CELL", help="run this cell alone, once, and judge it")
    parser.add_argument(
        "--calls",
        default="",
        metavar="CALLS",
        help='with these calls: "step(), export(max_shard_size=7)"',
    )
    parser.set_defaults(call=_search, finds_drivers=True)


def _search(options: argparse.Namespace) -> int:
    """Run the search, or the candidate of ``--cell`` alone; return the exit code."""
    if options.cell:
        return _alone(options)
    # What was tried, kept and seen to fail so far.
    state = _state(options)
    reached = _reached(options)
    limit = _limit(options)
    deadline = clock.now() + _seconds(options.budget)
    with Trials(reached.branches) as trials:
        search = Search(
            _spaces(options),
            state,
            reached.branches,
            trials.installed.functions,
            readers=reached.readers,
            guided=not options.blind,
        )
        first: list[Candidate] = []
        if not options.blind:
            first = read_corpus(options.corpus)
        if limit > 0 and clock.now() < deadline:
            for number, step in enumerate(search.run(first, trials.run), start=1):
                _print_step(step)
                # After each candidate, so that an interrupted search loses nothing.
                if options.state:
                    state.write(options.state)
                if number >= limit or clock.now() >= deadline:
                    break
    _print_summary(state)
    if options.output:
        with named_in_errors(options.output):
            options.output.write_text(corpus_text(state.kept), encoding="utf-8")
        print(f"written: {options.output}")
    return int(bool(state.found))


def _reached(options: argparse.Namespace) -> Reached:
    """Return the branches that cells reach by the map of ``--map``; none without a map.

    ``readers`` of the result are names, and how many unreached branches have each in their
    condition: the search draws settings with such a name more often.
    """
    if not options.map:
        return Reached()
    return read_reached(options.map)


def _alone(options: argparse.Namespace) -> int:
    """Run the candidate of ``--cell`` and ``--calls``, and return the exit code.

    A finding of a search is printed with such a command, by which it can be repeated.
    """
    if not options.driver or len(options.driver) > 1:
        raise UsageProblem("--cell needs one --driver")
    try:
        calls = parse_calls(options.calls)
    except (ValueError, SyntaxError) as error:
        raise UsageProblem(f"--calls {options.calls}: {error}") from None
    cell = Cell.parse(options.cell)
    candidate = Candidate(options.driver[0], cell, tuple(calls))
    # A space has the candidates of a driver under some strategies; ``sound`` tells whether it has
    # this one.
    space = DriverSpace(candidate.driver, [candidate.cell.strategy])
    if not space.sound(candidate):
        raise UsageProblem(
            f"{candidate}: the driver cannot do this, or what a call does is known to be broken"
        )
    known = _reached(options).branches
    with Trials(known) as trials:
        outcome = trials.run(candidate)
        new = outcome.branches.without(known)
        counted = f"{len(outcome.branches)} branches, {len(new)} new"
        print(f"{candidate}: {counted}")
        # Without a map all branches are new, which is too much to list.
        if options.map:
            # ``torchao/optim/adam.py _AdamBase.step: 11``: the functions that have new branches.
            for text in trials.installed.functions(new):
                print(f"  {text}")
    if outcome.refused:
        print(f"refused: {outcome.refused}")
    if outcome.problem:
        print(f"FAIL: {outcome.problem}")
    return int(bool(outcome.problem))


def _state(options: argparse.Namespace) -> State:
    """Return the state to go on from: that of ``--state`` if the file exists, else a new one.

    The states of ``--add`` are added.

    Raises:
        UsageProblem: The state is of a search with another seed, shard or releases.
    """
    if not re.fullmatch(r"[1-9]\d*/[1-9]\d*", options.shard):
        raise UsageProblem(
            f"--shard {options.shard}: expected one part of several, as 1/3, 2/3 or 3/3"
        )
    state = State(options.seed, options.shard, dict(versions()))
    if options.state and options.state.exists():
        state = State.read(options.state)
        if (state.seed, state.shard) != (options.seed, options.shard):
            raise UsageProblem(
                f"{options.state}: it is of --seed {state.seed} --shard {state.shard}"
            )
        if state.versions != versions():
            raise UsageProblem(f"{options.state}: it is of other releases; begin a new one")
    for path in options.add:
        state.add(State.read(path))
    return state


def _limit(options: argparse.Namespace) -> float:
    """Return how many candidates to try at most; with ``--budget`` alone there is no limit."""
    if options.candidates is not None:
        return float(options.candidates)
    if options.budget:
        return float("inf")
    return 100.0


def _seconds(text: str | None) -> float:
    """Return the seconds of a time like ``20m``; infinity for None."""
    if text is None:
        return float("inf")
    match = re.fullmatch(r"(\d+)([smh])", text)
    if match is None:
        raise UsageProblem(f"--budget {text}: expected a time, as 90s, 20m or 2h")
    return int(match[1]) * _SECONDS_BY_UNIT[match[2]]


def _spaces(options: argparse.Namespace) -> Sequence[DriverSpace]:
    """Return the space of candidates of each driver that supports any of the strategies."""
    from pytest_distcompat.drivers import DRIVERS
    from pytest_distcompat.strategies import STRATEGIES

    names = options.driver or list(DRIVERS.names())
    strategies = options.strategy or list(STRATEGIES.names())
    usable: list[DriverSpace] = []
    for name in names:
        space = DriverSpace(name, strategies)
        if space.strategies:
            usable.append(space)
    if not usable:
        drivers_text = ", ".join(names)
        strategies_text = ", ".join(strategies)
        raise UsageProblem(f"none of {drivers_text} runs under {strategies_text}")
    return usable


def _print_step(step: Step) -> None:
    """Print a candidate: ``+12 torch fsdp2-fp32-w2`` if it reached 12 new branches."""
    new_branches = "  "
    if step.new_branches:
        new_branches = f"+{step.new_branches}"
    print(new_branches, step.candidate, flush=True)
    if step.outcome.refused:
        print(f"     refused: {step.outcome.refused[:160]}", flush=True)
    if step.found is not None:
        print(f"     FAIL: {step.outcome.problem}", flush=True)
        # The command is printed for the first candidate that fails in this way.
        if step.found.times == 1:
            print(f"     {step.found.candidate.command}", flush=True)


def _print_summary(state: State) -> None:
    """Print the numbers of the whole search, and all findings."""
    tried = f"{len(state.tried)} candidates in {state.seconds:.0f} s"
    new = f"{len(state.new_branches)} new branches by {len(state.kept)}"
    # Few kept candidates that together reach all new branches.
    cover = list(smallest_cover(state.kept))
    failures = f"{state.refused} refused, {len(state.found)} findings"
    print()
    print(f"{tried}: {new}, of which {len(cover)} reach all; {failures}")
    for finding in state.found:
        print(finding.problem)
        print(f"    {finding.times} times; {finding.candidate.command}")
