"""The run of a marked test: its ranks run it, in place of pytest's process.

A test with ``@pytest.mark.distcompat(world_size=2)`` runs on two *ranks*, the processes of one
torchrun process group. This is the second of the three steps ``declare``, ``run``, ``outcome``:

1. The hook ``pytest_runtest_setup`` calls ``take_over``, which replaces the item's function.
2. pytest calls that as it calls any test. It is ``run_on_ranks``, which sends a ``Request`` to the
   *launcher* and waits. The launcher starts the ranks, each of which runs the item by
   ``rank_session.run``, and returns an ``Ending``: how each rank ended and what it logged.
3. ``merge.merge`` makes one ``Outcome`` of it, and ``run_on_ranks`` ends as that says: it
   returns, skips, xfails or raises, so that pytest reports it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.plugin.marked.declare import Mark, mark_of, spread_of
from pytest_distcompat.plugin.marked.merge import UNCAPTURED, merge
from pytest_distcompat.plugin.marked.outcome import (
    OUTCOME,
    Outcome,
    disagreement,
)
from pytest_distcompat.plugin.on_ranks import rank_session
from pytest_distcompat.plugin.session import SESSION, DistcompatSession

if TYPE_CHECKING:
    from pytest_distcompat.launch.forensics.ending import Ending
    from pytest_distcompat.launch.request import Request

#: Where an item has the time limit that pytest-timeout sets for it, in seconds.
TIME_LIMIT: pytest.StashKey[float] = pytest.StashKey()


# Taking the call over.


def take_over(item: pytest.Function) -> None:
    """Have the ranks run a marked test when pytest calls it.

    In this process no fixture of the test is set up, and its function is never called.
    """
    # An extension may answer in the place of ranks, without starting any. It cannot run tests.
    substitute = item.config.stash[SESSION].substitute
    if substitute is not None:
        pytest.skip(substitute.needs_ranks)
    item.fixturenames = []
    _hide_text_conditions(item)
    # A plugin that repeats failed tests sets the item up again.
    if OUTCOME in item.stash:
        del item.stash[OUTCOME]

    def runtest() -> None:
        __tracebackhide__ = True
        run_on_ranks(item)

    if getattr(item.obj, "is_hypothesis_test", False):
        # Hypothesis reads the fixtures of the function before it calls it.
        item.obj = runtest
    # On the item itself: it hides the method ``runtest`` of its class, which calls the function.
    vars(item)["runtest"] = runtest


def _hide_text_conditions(item: pytest.Function) -> None:
    """Hide marks with a text as their condition from pytest in this process.

    An example is ``@pytest.mark.skipif("int(os.environ['RANK']) > 0")``: the condition may read
    variables that only a rank has. The ranks evaluate all marks.
    https://docs.pytest.org/en/stable/historical-notes.html#conditions-as-strings-instead-of-booleans
    """
    original = item.iter_markers_with_node

    def iter_markers_with_node(name: str | None = None) -> Iterator[tuple[Any, pytest.Mark]]:
        for node, mark in original(name):
            if not _has_text_condition(mark):
                yield node, mark

    vars(item)["iter_markers_with_node"] = iter_markers_with_node


def _has_text_condition(mark: pytest.Mark) -> bool:
    """Tell whether pytest would evaluate a text for this mark."""
    if mark.name not in {"skipif", "xfail"}:
        return False
    conditions = (mark.kwargs.get("condition"), *mark.args)
    return any(isinstance(condition, str) for condition in conditions)


# Running the test.


def run_on_ranks(item: pytest.Function) -> None:
    """Run the item on all ranks, and end as the worst of them did.

    Raises:
        RankFailure: The item failed.
        pytest.skip.Exception: All ranks skipped it, or there are not enough GPUs.
        pytest.xfail.Exception: It failed as its xfail mark expects.
    """
    session = item.config.stash[SESSION]
    mark = mark_of(item)
    assert mark is not None
    reason = _why_not_run(item, mark, session)
    if reason:
        pytest.skip(reason)
    request = _request(item, mark, session)
    ending = _run(request, item, session)
    outcome = merge(ending)
    # Some tests run a second time (``--distcompat-verify``). The cold command ``torchrun`` starts
    # all ranks on this machine.
    if request.spread.on_one and session.verifies(session.nodeid_of(item)):
        outcome = _verify(outcome, request, session, item)
    if _shows_output_at_once(item.config):
        outcome = _print_uncaptured(outcome)
    item.stash[OUTCOME] = outcome
    if ending.notice:
        session.notice(ending.notice)
    item.user_properties.extend(outcome.properties)
    item.user_properties.extend(ending.properties.items())
    _end_as(outcome, ending, item)


def _why_not_run(item: pytest.Item, mark: Mark, session: DistcompatSession) -> str:
    """Return why the item's ranks cannot be started here; empty if they can."""
    spread = spread_of(item, mark, session)
    # The session has several machines, and the mark does not say how many of them.
    if spread.uneven and mark.nodes is None:
        return f"{spread.uneven}{session.placement.hint}"
    return spread.uneven or session.too_large(spread.local_size)


def _run(request: Request, item: pytest.Function, session: DistcompatSession) -> Ending:
    """Have ranks run the item: those of an extension, which tests may share, else new ones."""
    by_extension: Ending | None = item.config.hook.pytest_distcompat_run(
        session=session, item=item, request=request
    )
    if by_extension is not None:
        return by_extension
    return session.launcher.run(request)


def _request(item: pytest.Function, mark: Mark, session: DistcompatSession) -> Request:
    """Return the request to the launcher: what ranks call, with what, and how many ranks do."""
    from pytest_distcompat.launch.request import Request

    limit_of_test = mark.timeout or session.timeout
    timeout = min(limit_of_test, item.stash.get(TIME_LIMIT, math.inf))
    spread = spread_of(item, mark, session)
    directory = str(session.new_directory(item.originalname))
    # Where the fixture ``shared_dir`` is. Ranks of one machine have it below the request's
    # directory.
    shared = "" if spread.on_one else directory
    payload = rank_session.ItemPayload(
        nodeid=session.nodeid_of(item),
        device=session.device,
        directory=directory,
        world_size=spread.world_size,
        session=str(session.description_file),
        shared=shared,
    )
    return Request(
        target=rank_session.RUN,
        payload=dataclasses.asdict(payload),
        world_size=spread.world_size,
        directory=directory,
        collected=os.path.realpath(item.path),
        timeout=timeout,
        nodes=spread.nodes,
    )


def _end_as(outcome: Outcome, ending: Ending, item: pytest.Function) -> None:
    """End the call in pytest's process as the test ended on its ranks; see ``run_on_ranks``."""
    if outcome.kind == "failed":
        # The rank in which a debugger (--pdb) can stop: one that raised an exception.
        rank = None
        if ending.cause is not None and ending.cause.status == "raised":
            rank = ending.cause.rank
        session = item.config.stash[SESSION]
        session.note_failed_run(item, ending.command, rank)
        reproduce = session.reproduce(item)
        lines = (outcome.text, f"reproduce: {reproduce}", f"this run alone: {ending.command}")
        raise outcome.failure("\n".join(lines))
    if outcome.kind == "skipped":
        pytest.skip(outcome.text)
    if outcome.kind == "xfailed":
        pytest.xfail(outcome.text)


def _verify(
    outcome: Outcome, request: Request, session: DistcompatSession, item: pytest.Function
) -> Outcome:
    """Run the item again under cold torchrun.

    Ranks are *warm* if they are forked from a process that has imported torch and collected the
    tests before; *cold* ones are new interpreters, as under a user's own ``torchrun``. ``plain``
    hides from the test a variable that this plugin sets on its ranks (``ItemPayload``).

    Args:
        outcome: The outcome of the first run, on warm ranks.
        request: The request of the first run.
        session: The plugin's session.
        item: The item.

    Returns:
        The same outcome; a failure if the second one differs.
    """
    directory = str(session.new_directory(f"cold-{item.originalname}"))
    payload = {**request.payload, "directory": directory, "plain": True}
    cold_request = dataclasses.replace(request, directory=directory, payload=payload)
    cold = merge(session.cold_launcher.run(cold_request))
    same_kind = cold.kind == outcome.kind
    # A pass with a text is another outcome than one without: see ``Outcome.text``.
    if same_kind and bool(cold.text) == bool(outcome.text):
        return outcome
    text = disagreement(outcome.kind, cold.kind, cold.text or outcome.text)
    return dataclasses.replace(outcome, kind="failed", text=text, hard=True, location=None)


def _shows_output_at_once(config: pytest.Config) -> bool:
    """Tell whether the user sees what tests print while they run (``-s``).

    In a worker of xdist nobody does.
    """
    shows_output = config.getoption("capture", "no") in {"no", "tee-sys"}
    return shows_output and not hasattr(config, "workerinput")


def _print_uncaptured(outcome: Outcome) -> Outcome:
    """Print the uncaptured output of the ranks, for pytest's -s; return the outcome without it."""
    captured = []
    for title, content in outcome.sections:
        if title.startswith(UNCAPTURED):
            print(f"\n{title}:\n{content}")  # noqa: T201 - it is what the ranks printed
        else:
            captured.append((title, content))
    return dataclasses.replace(outcome, sections=tuple(captured))
