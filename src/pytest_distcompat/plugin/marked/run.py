"""Room 2 of a marked test: its ranks run it, in place of pytest's process."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.plugin.marked.declare import Mark, mark_of, scope_of, spread_of
from pytest_distcompat.plugin.marked.outcome import (
    OUTCOME,
    UNCAPTURED,
    Outcome,
    disagreement,
    merge,
)
from pytest_distcompat.plugin.on_ranks import rank_session
from pytest_distcompat.plugin.session import SESSION, DistcompatSession

if TYPE_CHECKING:
    from pytest_distcompat.launch.forensics.ending import Ending
    from pytest_distcompat.launch.request import Request
    from pytest_distcompat.launch.reused_ranks import Reuse

#: The time limit that pytest-timeout sets for the item, in seconds.
TIME_LIMIT: pytest.StashKey[float] = pytest.StashKey()
#: The item that pytest runs next.
NEXT_ITEM: pytest.StashKey[pytest.Item | None] = pytest.StashKey()


# Taking the call over.


def take_over(item: pytest.Function) -> None:
    """Have the ranks run a marked test: in this process no fixture is set up, and its function is never called."""
    substitute = item.config.stash[SESSION].substitute
    if substitute is not None:
        pytest.skip(substitute.needs_ranks)
    item.fixturenames = []
    _hide_text_conditions(item)
    if OUTCOME in item.stash:
        del item.stash[OUTCOME]

    def runtest() -> None:
        __tracebackhide__ = True
        run_on_ranks(item)

    if getattr(item.obj, "is_hypothesis_test", False):
        # Hypothesis reads the fixtures of the function before it calls it.
        item.obj = runtest
    vars(item)["runtest"] = runtest


def _hide_text_conditions(item: pytest.Function) -> None:
    """Hide marks with a text as their condition from pytest in this process: it may read variables of a rank.

    The ranks evaluate all marks.
    https://docs.pytest.org/en/stable/historical-notes.html#conditions-as-strings-instead-of-booleans
    """
    original = item.iter_markers_with_node

    def iter_markers_with_node(name: str | None = None) -> Iterator[tuple[Any, pytest.Mark]]:
        for node, mark in original(name):
            if not _has_text_condition(mark):
                yield node, mark

    vars(item)["iter_markers_with_node"] = iter_markers_with_node


def _has_text_condition(mark: pytest.Mark) -> bool:
    if mark.name not in {"skipif", "xfail"}:
        return False
    conditions = (mark.kwargs.get("condition"), *mark.args)
    return any(isinstance(condition, str) for condition in conditions)


# Running the test.


def run_on_ranks(item: pytest.Function) -> None:
    """Run the item on all ranks, and end as the worst of them did.

    Raises:
        RankFailure: The item failed. A skip and an xfail are raised as pytest does.
    """
    session = item.config.stash[SESSION]
    mark = mark_of(item)
    assert mark is not None
    reason = _why_not_run(item, mark, session)
    if reason:
        pytest.skip(reason)
    next_item = _next_on_same_ranks(item, session)
    reuse = _reuse(item, session, next_item)
    request = _request(item, mark, session, reuse, next_item)
    ending = session.launcher.run(request, reuse)
    outcome = merge(ending)
    # Cold torchrun starts all ranks on this machine.
    if request.spread.on_one and session.verifies(session.nodeid_of(item)):
        outcome = _verify(outcome, request, session, item)
    if _shows_output_at_once(item.config):
        outcome = _print_uncaptured(outcome)
    item.stash[OUTCOME] = outcome
    if ending.notice:
        session.notice(ending.notice)
    item.user_properties.extend(outcome.properties)
    if ending.left:
        item.user_properties.append(("distcompat: ranks left", ending.left))
    _end_as(outcome, ending, item)


def _why_not_run(item: pytest.Item, mark: Mark, session: DistcompatSession) -> str:
    """Return why the item's ranks cannot be started here; empty if they can."""
    spread = spread_of(item, mark, session)
    if spread.uneven and mark.nodes is None:
        return f"{spread.uneven}{session.placement.hint}"
    return spread.uneven or session.too_large(spread.local_size)


def _request(
    item: pytest.Function,
    mark: Mark,
    session: DistcompatSession,
    reuse: Reuse | None,
    next_item: pytest.Item | None,
) -> Request:
    """Return the request to the launcher to run the item.

    Args:
        item: The item.
        mark: What its mark says.
        session: The session of this process.
        reuse: How the ranks are shared with other items; None if they are not.
        next_item: The item that runs next on the same ranks, if there is one.
    """
    from pytest_distcompat.launch.request import ANY_MODULE, Request

    spread = spread_of(item, mark, session)
    directory = str(session.new_directory(item.originalname))
    next_nodeid = None
    if next_item is not None:
        next_nodeid = session.nodeid_of(next_item)
    payload = rank_session.ItemPayload(
        nodeid=session.nodeid_of(item),
        next=next_nodeid,
        device=session.device,
        directory=directory,
        world_size=spread.world_size,
        session=str(session.description_file),
        shared="" if spread.on_one else directory,
    )
    collected = os.path.realpath(item.path)
    if reuse is not None and reuse.scope.startswith("session"):
        # Ranks that several modules share must suit each of them.
        collected = ANY_MODULE
    return Request(
        target=rank_session.RUN,
        payload=dataclasses.asdict(payload),
        world_size=spread.world_size,
        directory=directory,
        collected=collected,
        timeout=min(mark.timeout or session.timeout, item.stash.get(TIME_LIMIT, math.inf)),
        nodes=spread.nodes,
    )


def _end_as(outcome: Outcome, ending: Ending, item: pytest.Function) -> None:
    """End the call in pytest's process as the test ended on its ranks.

    Raises:
        RankFailure: The item failed. A skip and an xfail are raised as pytest does.
    """
    if outcome.kind == "failed":
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
    """Run the item again under cold torchrun; return the same outcome, or a failure if the second one differs."""
    if session.reuse_scope:
        # Ranks that are kept hold the devices.
        session.launcher.retire()
    directory = str(session.new_directory(f"cold-{item.originalname}"))
    payload = {**request.payload, "directory": directory, "plain": True}
    cold_request = dataclasses.replace(request, directory=directory, payload=payload)
    cold = merge(session.cold_launcher.run(cold_request))
    if cold.kind == outcome.kind and bool(cold.text) == bool(outcome.text):
        return outcome
    text = disagreement(outcome.kind, cold.kind, cold.text or outcome.text)
    return dataclasses.replace(outcome, kind="failed", text=text, hard=True, location=None)


def _shows_output_at_once(config: pytest.Config) -> bool:
    """Tell whether the user sees what tests print while they run (``-s``); in a worker of xdist nobody does."""
    return config.getoption("capture", "no") in {"no", "tee-sys"} and not hasattr(
        config, "workerinput"
    )


def _print_uncaptured(outcome: Outcome) -> Outcome:
    """Print the uncaptured output of the ranks, for pytest's -s; return the outcome without it."""
    captured = []
    for title, content in outcome.sections:
        if title.startswith(UNCAPTURED):
            print(f"\n{title}:\n{content}")  # noqa: T201 - it is what the ranks printed
        else:
            captured.append((title, content))
    return dataclasses.replace(outcome, sections=tuple(captured))


# Ranks that several tests share (``reuse``).


def before(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Note the next item, and end ranks that are kept for others than this one, if the teardown before it did not."""
    item.stash[NEXT_ITEM] = nextitem
    session = item.config.stash[SESSION]
    problem = _retire(session, item)
    if problem:
        session.notice(f"ranks that were kept did not leave well: {problem}")


def after(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End ranks that are kept, unless the next item runs on them: they would hold devices for nothing.

    They tear down the fixtures that their tests shared, as pytest does after the last test that could have used them, even if
    that one was skipped. A rank that does not end well is an error of this item's teardown.
    """
    problem = _retire(item.config.stash[SESSION], nextitem)
    if problem:
        pytest.fail(f"ranks that tests shared did not leave well: {problem}", pytrace=False)


def _retire(session: DistcompatSession, next_item: pytest.Item | None) -> str:
    """End ranks that are kept, unless they are kept for that item; return what went wrong, empty if nothing did."""
    if not session.reuse_scope:
        return ""
    if next_item is not None and session.reuse_scope == scope_of(next_item, session):
        return ""
    return session.launcher.retire()


def _next_on_same_ranks(item: pytest.Item, session: DistcompatSession) -> pytest.Item | None:
    """Return the item that runs next, if it shares the ranks of this one."""
    scope = scope_of(item, session)
    next_item = item.stash.get(NEXT_ITEM, None)
    if scope is None or next_item is None or scope_of(next_item, session) != scope:
        return None
    return next_item


def _reuse(
    item: pytest.Item, session: DistcompatSession, next_item: pytest.Item | None
) -> Reuse | None:
    """Return how the item's ranks are kept for others; None if they are its own."""
    from pytest_distcompat.launch.reused_ranks import Reuse

    scope = scope_of(item, session)
    if scope is None:
        return None
    return Reuse(scope, session.setting("reuse_limit").value, next_item is None)
