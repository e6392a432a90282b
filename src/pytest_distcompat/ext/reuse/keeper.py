"""Keep ranks between requests: start them, have them do requests, and end them in time.

``shared.SharedRanks`` has one ``RankKeeper`` in a session, and calls ``run`` for each test that
shares ranks with others. A ``Request`` (what the ranks do) and a ``Reuse`` (which requests share
ranks) come in, an ``Ending`` (how the ranks did it) goes out. If all went well and a later test
needs the ranks, they stay and wait: then ``scope`` is not empty.

The ranks are those of an *open run* of the launcher. For each request a ``Watchdog`` kills ranks
that hang (``acted``), ``wait`` returns when all ranks have replied or ended, and ``ending`` (the
ranks go on) or ``conclude`` (they are gone) returns the ``Ending``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pytest_distcompat.ext.reuse.reused_ranks import SERVE, Reuse, ReusedRanks
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.forensics.watchdog import Watchdog
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.request import Request
from pytest_distcompat.leased import current_item

#: The name of a test's property that says why its ranks could do no further request. The value is
#: ``ReusedRanks.end_reason``.
LEFT = "distcompat: ranks left"


class RankKeeper:
    """The ranks that a launcher keeps for a next request.

    Args:
        launcher: Starts the ranks; it can hold a run open.
        notice: Called with a sentence for the user that concerns no single test.
    """

    def __init__(self, launcher: Launcher, notice: Callable[[str], None]) -> None:
        self._launcher = launcher
        self._notice = notice
        self._ranks: ReusedRanks | None = None
        #: The item for which the ranks were started.
        self._started_for = ""

    @property
    def scope(self) -> str:
        """The scope of the ranks that wait for a request; empty if there are none."""
        if self._ranks is None:
            return ""
        return self._ranks.reuse.scope

    def run(self, request: Request, reuse: Reuse) -> Ending:
        """Do the request with kept ranks or new ones, and return how it ended.

        If all went well the ranks wait for the next request. If they could not stay, the ending has
        the property ``LEFT`` with the reason.
        """
        try:
            problem = self._launcher.get_warm()
            if problem:
                self._drop_lost()
                return Ending.not_launched(request.world_size, problem)
            return self._run(request, reuse)
        except BaseException:
            # Ctrl-C, or pytest-timeout's signal: no process of ours may live on.
            self.drop()
            self._launcher.close()
            raise

    def _run(self, request: Request, reuse: Reuse) -> Ending:
        """Do the request; the launcher is ready to start ranks."""
        self._drop_lost()
        died = self._died_waiting()
        self._end_unfit(reuse)
        ranks = self._ranks
        if ranks is None:
            ranks = self._ranks = ReusedRanks(self._launcher.open(request, SERVE), reuse, request)
            self._started_for = current_item() or request.directory
        # With the changes of environment since these ranks were started.
        request = ranks.run.adapted(request)
        ranks.send(request)
        watch = Watchdog(request, ranks.files)
        answer = ranks.run.wait(watch, ranks)
        # torchrun's agent, which started the ranks, answers only when all have ended: one has
        # failed or was killed.
        if answer is not None or watch.acted:
            self.drop()
            return ranks.run.conclude(watch, answer)
        # ``end_reason`` says what the request left changed on a rank, as ``the environment``.
        if not (reuse.last or ranks.end_reason):
            ending = ranks.run.ending(watch, notice=died)
            # A child that a rank forked may have logged a failure although the rank went on.
            if not ending.failed:
                return ending
        ending = self._dismiss(ranks, watch)
        if ranks.end_reason:
            return replace(ending, properties={LEFT: ranks.end_reason})
        return ending

    def retire(self) -> str:
        """End the ranks that wait for a request, if there are any.

        Return what went wrong; empty if nothing did.
        """
        self._drop_lost()
        ranks = self._ranks
        if ranks is None:
            return ""
        # The last request's fixtures are torn down now, and have the time limit that it had.
        ending = self._charge_nobody(
            self._dismiss(ranks, Watchdog(ranks.current_request, ranks.files))
        )
        return ending.text() if ending.failed else ""

    def drop(self) -> None:
        """Close the sockets of the ranks, so that they end, and forget them."""
        if self._ranks is not None:
            self._ranks.dismiss()
            self._ranks = None

    def _drop_lost(self) -> None:
        """Forget ranks whose launcher process is gone, and they with it."""
        if self._ranks is not None and not self._ranks.run.open:
            self.drop()

    def _died_waiting(self) -> str:
        """Describe how ranks died while they waited for a request; empty if they did not.

        The text becomes a notice of the next request's ending, not a failure: that request is not
        to blame.
        """
        ranks = self._ranks
        if ranks is None:
            return ""
        # Notice a socket that a rank has closed since.
        ranks.receive()
        if not ranks.lost:
            return ""
        ending = self._charge_nobody(self._dismiss(ranks, Watchdog(ranks.run.start_request)))
        return f"between two tests {ending.headline()}; new ranks were started"

    def _end_unfit(self, reuse: Reuse) -> None:
        """End the kept ranks if they cannot do a request of that scope."""
        ranks = self._ranks
        if ranks is None:
            return
        if ranks.reuse.scope != reuse.scope:
            problem = self.retire()
            if problem:
                self._notice(f"ranks that were kept did not leave well: {problem}")
        elif ranks.homeless:
            # The directory to which they write is gone, and their logs with it: they cannot say how
            # they ended.
            self.retire()

    def _dismiss(self, ranks: ReusedRanks, watch: Watchdog) -> Ending:
        """End ranks, and return their end as that of the watched request."""
        self.drop()
        return ranks.run.conclude(watch, ranks.run.wait(watch))

    def _charge_nobody(self, ending: Ending) -> Ending:
        """Give a notice of what ranks leaked, and return their ending without the leaks.

        Any of the tests that shared the ranks may have leaked, so none of them fails for it.
        """
        for leak in ending.leaks:
            self._notice(f"ranks that {self._started_for} and later tests shared: {leak}")
        return replace(ending, leaks=())
