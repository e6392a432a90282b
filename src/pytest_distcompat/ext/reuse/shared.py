"""Which marked tests share ranks, and when these end.

A marked test has ``@pytest.mark.distcompat``: it runs on several ranks. With ``--distcompat-reuse
module`` the tests of a module that follow each other run on the same ranks. ``plugin`` registers a
``SharedRanks`` in pytest's process. The core's hook ``pytest_distcompat_run`` asks it to run a
test: it returns an ``Ending`` if the test shares ranks, else None. ``plugin`` also calls ``begin``
before each test and ``end`` after it.

Tests share ranks if they have the same *scope*, a text such as ``module tests/test_a.py 2``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.plugin.marked.declare import mark_of, spread_of, world_size_of
from pytest_distcompat.plugin.session import DistcompatSession

if TYPE_CHECKING:
    from pytest_distcompat.ext.reuse.keeper import RankKeeper
    from pytest_distcompat.launch.forensics.ending import Ending
    from pytest_distcompat.launch.request import Request

#: In an item's stash (pytest's dict for plugins' data): the item that pytest runs after it.
_NEXT_ITEM: pytest.StashKey[pytest.Item | None] = pytest.StashKey()


def scope_of(item: pytest.Item, session: DistcompatSession) -> str | None:
    """Return the scope of a test, which all tests have that share ranks with it.

    For example ``module tests/test_a.py 2``, or ``session  2`` for all tests of a session on two
    ranks. Return None if the test has ranks of its own, or runs on no ranks.
    """
    mark = mark_of(item)
    if mark is None:
        return None
    reuse = mark.added.get("reuse") or session.setting("reuse").value
    # Ranks that are spread over several machines are not shared.
    if reuse == "never" or not spread_of(item, mark, session).on_one:
        return None
    module = ""
    if reuse == "module":
        module = item.nodeid.partition("::")[0]
    return f"{reuse} {module} {world_size_of(item, mark, session)}"


class SharedRanks:
    """The shared ranks of a session, as a plugin with two hooks of the core.

    Tests that follow each other, and have the same scope, share ranks.
    """

    def __init__(self, session: DistcompatSession) -> None:
        self._session = session
        self._keeper: RankKeeper | None = None

    def pytest_distcompat_group(self, session: DistcompatSession, item: pytest.Item) -> str | None:
        """Return the scope of a test, so that one worker of xdist runs all tests of a scope."""
        return scope_of(item, session)

    def pytest_distcompat_run(
        self, session: DistcompatSession, item: pytest.Function, request: Request
    ) -> Ending | None:
        """Run a test on shared ranks, if it has a scope and the launcher can keep ranks.

        Return None otherwise: then the core runs it on ranks of its own.
        """
        scope = scope_of(item, session)
        if scope is None or not session.launcher.can_open:
            return None
        # ``RankKeeper`` keeps the ranks of one scope between tests, and ends them for another
        # scope. Imported now: most sessions share no ranks.
        from pytest_distcompat.ext.reuse import rank_item
        from pytest_distcompat.ext.reuse.keeper import RankKeeper
        from pytest_distcompat.ext.reuse.reused_ranks import Reuse
        from pytest_distcompat.launch.request import ANY_MODULE

        if self._keeper is None:
            self._keeper = RankKeeper(session.launcher, session.notice)
            session.config.add_cleanup(self._keeper.drop)
        next_item = self._next_on_same_ranks(item, scope)
        next_nodeid = None
        if next_item is not None:
            next_nodeid = session.nodeid_of(next_item)
        payload = {"item": request.payload, "next": next_nodeid}
        request = dataclasses.replace(request, target=rank_item.RUN, payload=payload)
        if scope.startswith("session"):
            # Ranks that several modules share must suit each of them: none of these modules may
            # have done at its import what ranks must do themselves (``Findings``).
            request = dataclasses.replace(request, collected=ANY_MODULE)
        limit = session.setting("reuse_limit").value
        ending = self._keeper.run(request, Reuse(scope, limit, next_item is None))
        if session.verifies(session.nodeid_of(item)):
            # ``--distcompat-verify``: the test runs a second time, on new ranks of torchrun. They
            # need the devices that these ranks hold.
            self._keeper.retire()
        return ending

    def _next_on_same_ranks(self, item: pytest.Item, scope: str) -> pytest.Item | None:
        """Return the item that runs next, if it shares the ranks of this one."""
        next_item = item.stash.get(_NEXT_ITEM, None)
        if next_item is None or scope_of(next_item, self._session) != scope:
            return None
        return next_item

    def begin(self, item: pytest.Item, next_item: pytest.Item | None) -> None:
        """Note the next item, and end ranks that are kept for others than this one.

        Mostly ``end`` has done that already, in the teardown of the item before.
        """
        item.stash[_NEXT_ITEM] = next_item
        problem = self._retire(item)
        if problem:
            self._session.notice(f"ranks that were kept did not leave well: {problem}")

    def end(self, next_item: pytest.Item | None) -> None:
        """End ranks that are kept, unless the next item runs on them.

        They would hold devices for nothing. They tear down the fixtures that their tests shared, as
        pytest does after the last test that could have used them, even if that one was skipped. A
        rank that does not end well is an error of the ended item's teardown.
        """
        problem = self._retire(next_item)
        if problem:
            pytest.fail(f"ranks that tests shared did not leave well: {problem}", pytrace=False)

    @property
    def scope(self) -> str:
        """The scope of the ranks that are kept for a next test; empty if there are none."""
        if self._keeper is None:
            return ""
        return self._keeper.scope

    def _retire(self, next_item: pytest.Item | None) -> str:
        """End ranks that are kept, unless they are kept for that item.

        Returns:
            What went wrong; empty if nothing did.
        """
        if self._keeper is None or not self.scope:
            return ""
        if next_item is not None and self.scope == scope_of(next_item, self._session):
            return ""
        return self._keeper.retire()
