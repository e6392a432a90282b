"""One item on a rank that has run others before it, and may run more."""

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

RUN = f"{__name__}:run"


def run(payload: Mapping[str, Any], log: RankLog) -> None:
    """Run one item on this rank.

    Args:
        payload: ``item`` is an ``ItemPayload`` as plain data; ``next`` is the node id of the item that
            these ranks run after it, None if they run none.
        log: Gets the item's phases.
    """
    reused = request_loop.reused
    if reused is None:
        # A run by hand, of one item.
        rank_session.run(payload["item"], log)
        return
    asked = decode.decode(ItemPayload, payload["item"])
    is_collected = preload.collected is not None
    session = rank_session.collected_session(asked, log)
    if not is_collected:
        reused.reset_baseline()
    item = rank_session.find_item(session, asked.nodeid)
    next_item = rank_session.items_of(session).get(payload["next"] or "")
    _reset_between_items(reused, item)
    # Not the directory of this request: pytest has made its base temporary directory before, and the
    # agent writes its logs there too.
    with rank_session.reporting(item, asked, log, reused.directory):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)


def _reset_between_items(reused: ReusedRank, item: pytest.Item) -> None:
    """Tear down what earlier items left on kept ranks and this item does not use.

    ``Session._setupstate`` is private; ``tests/plugin/test_private_names.py`` fails when it goes away.
    """
    state = item.session._setupstate  # noqa: SLF001 - see the docstring
    # The teardown before assumed another next item, if the parent has skipped that one.
    state.teardown_exact(item)
    if not reused.at_end:
        # When these ranks end, whatever is still set up is torn down too.
        reused.at_end += [item.config._ensure_unconfigure, lambda: state.teardown_exact(None)]  # noqa: SLF001
    if "process_group" not in getattr(item, "fixturenames", ()):
        # The test may initialize its own process group.
        reused.without_group()
