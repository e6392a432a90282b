"""Run one test on a rank process that has run other tests before it, and may run more.

``shared`` names ``run`` as the target of the request for a test that shares ranks. On each rank
``request_loop`` calls it with the request's payload. It runs the item by pytest's own hook
(``pytest_runtest_protocol``), so fixtures of a wider scope stay set up for the next item.

``request_loop`` keeps a ``ReusedRank`` while the process lives. After each item it compares the
state of the process (environment, signal handlers, ...) with a baseline from before; pytest's
process ends the ranks if a test has changed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pytest_distcompat import decode
from pytest_distcompat.ext.reuse import request_loop
from pytest_distcompat.ext.reuse.request_loop import ReusedRank
from pytest_distcompat.launch import preload
from pytest_distcompat.launch.rank_log import RankLog
from pytest_distcompat.plugin.on_ranks import rank_session
from pytest_distcompat.plugin.on_ranks.rank_session import ItemPayload

#: The name of ``run``, as a request has it.
RUN = f"{__name__}:run"


def run(payload: Mapping[str, Any], log: RankLog) -> None:
    """Run one item on this rank.

    Args:
        payload: ``item`` is an ``ItemPayload`` as plain data; ``next`` is the node id of the item
            that these ranks run after it, None if they run none.
        log: Gets the item's phases.
    """
    reused = request_loop.reused
    if reused is None:
        # A user repeats this one test by hand, under torchrun.
        rank_session.run(payload["item"], log)
        return
    item_payload = decode.decode(ItemPayload, payload["item"])
    # A rank that was forked has inherited the session with all tests.
    is_collected = preload.collected is not None
    session = rank_session.collected_session(item_payload, log)
    if not is_collected:
        # This rank has just collected the tests itself. What their imports changed in the process
        # must not count as a change by this test.
        reused.reset_baseline()
    item = rank_session.find_item(session, item_payload.nodeid)
    next_item = rank_session.items_of(session).get(payload["next"] or "")
    _reset_between_items(reused, item)
    # The directory is that of the first request: pytest has made its base temporary directory
    # there, and torchrun's agent writes the ranks' output there too.
    with rank_session.reporting(item, item_payload, log, reused.directory):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)


def _reset_between_items(reused: ReusedRank, item: pytest.Item) -> None:
    """Tear down fixtures and the process group that earlier items left and this one does not use.

    ``Session._setupstate`` is private; ``tests/plugin/test_private_names.py`` fails when it goes
    away.
    """
    state = item.session._setupstate  # noqa: SLF001 - see the docstring
    # After the earlier item pytest kept the fixtures of the item announced as next. If pytest's
    # process then skipped that one, they are still set up.
    state.teardown_exact(item)
    if not reused.at_end:
        # When these ranks end, whatever is still set up is torn down too. ``at_end`` is called in
        # reverse order: first the fixtures, then the plugins.
        unconfigure = item.config._ensure_unconfigure  # noqa: SLF001 - see the docstring
        reused.at_end += [unconfigure, lambda: state.teardown_exact(None)]
    if "process_group" not in getattr(item, "fixturenames", ()):
        # Without the fixture the test may initialize its own process group, which fails while
        # there is the one that tests share.
        reused.without_group()
