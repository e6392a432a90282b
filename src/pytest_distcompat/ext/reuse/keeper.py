"""Keeps ranks between requests: starts them, has them do requests, and ends them in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pytest_distcompat.ext.reuse.reused_ranks import SERVE, Reuse, ReusedRanks
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.forensics.watchdog import Watchdog
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.request import Request
from pytest_distcompat.leased import current_item

#: The property of a test that says why its ranks did not do the next one's request.
LEFT = "distcompat: ranks left"


class RankKeeper:
    """The ranks that a launcher keeps for a next request.

    Args:
        launcher: Starts the ranks; it can hold a run open.
        notice: Called with what concerns no single test.
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
        """Do the request with kept ranks or new ones.

        They wait for the next request if all went well. Why they do not is a property of the ending
        (``LEFT``).
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
        self._drop_lost()
        died = self._died_waiting()
        self._end_unfit(reuse)
        ranks = self._ranks
        if ranks is None:
            ranks = self._ranks = ReusedRanks(self._launcher.open(request, SERVE), reuse, request)
            self._started_for = current_item() or request.directory
        request = ranks.run.adapted(request)
        ranks.send(request)
        watch = Watchdog(request, ranks.files)
        answer = ranks.run.wait(watch, ranks)
        if answer is not None or watch.acted:
            self.drop()
            return ranks.run.conclude(watch, answer)
        if not (reuse.last or ranks.end_reason):
            ending = ranks.run.ending(watch, notice=died)
            # A child that a rank forked may have failed where the rank went on.
            if not ending.failed:
                return ending
        ending = self._dismiss(ranks, watch)
        if ranks.end_reason:
            return replace(ending, properties={LEFT: ranks.end_reason})
        return ending

    def retire(self) -> str:
        """End the ranks that wait for a request, if there are any, and return what went wrong."""
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
        """Let go of the ranks: they end, or have ended."""
        if self._ranks is not None:
            self._ranks.dismiss()
            self._ranks = None

    def _drop_lost(self) -> None:
        """Let go of ranks that have gone with their launcher process."""
        if self._ranks is not None and not self._ranks.run.open:
            self.drop()

    def _died_waiting(self) -> str:
        """Describe how ranks died while they waited for a request; empty if they did not.

        It becomes a notice: the next request is not to blame.
        """
        ranks = self._ranks
        if ranks is None:
            return ""
        ranks.receive()
        if not ranks.lost:
            return ""
        ending = self._charge_nobody(self._dismiss(ranks, Watchdog(ranks.run.start_request)))
        return f"between two tests {ending.headline()}; new ranks were started"

    def _end_unfit(self, reuse: Reuse) -> None:
        """End ranks that cannot do a request of that scope."""
        ranks = self._ranks
        if ranks is None:
            return
        if ranks.reuse.scope != reuse.scope:
            problem = self.retire()
            if problem:
                self._notice(f"ranks that were kept did not leave well: {problem}")
        elif ranks.homeless:
            # They cannot say how they left.
            self.retire()

    def _dismiss(self, ranks: ReusedRanks, watch: Watchdog) -> Ending:
        """End ranks, and return their end as that of the watched request."""
        self.drop()
        return ranks.run.conclude(watch, ranks.run.wait(watch))

    def _charge_nobody(self, ending: Ending) -> Ending:
        """Notice what ranks leaked, and return their ending without it.

        It cannot be known which of the tests that shared the ranks leaked.
        """
        for leak in ending.leaks:
            self._notice(f"ranks that {self._started_for} and later tests shared: {leak}")
        return replace(ending, leaks=())
