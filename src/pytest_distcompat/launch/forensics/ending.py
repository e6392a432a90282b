"""How all ranks of a run ended: the worst rank decides, and the first failure is shown first.

A run is one process group from start to end. ``conclude`` makes an ``Ending`` of each run, from
what the ranks logged and how their processes ended. The launchers return it, and three readers
judge by it: ``runner`` (a suite's run), ``plugin/marked/merge`` (a marked test) and
``ext/scripts/result`` (a script).

For example, rank 1 of 2 raises a ValueError, and rank 0 then loses its connection to rank 1:

- ``kind`` is ``raised``;
- ``cause`` is the ``RankEnd`` of rank 1, and that of rank 0 has the status ``lost peer``;
- ``headline()`` is ``rank 1 raised ValueError: ...``;
- ``text()`` has the traceback of rank 1, and one line below ``consequences:`` for rank 0.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pytest_distcompat.events import Action, Event, SnapshotTaken
from pytest_distcompat.launch.forensics.collectives import (
    WaitState,
    describe_wait_states,
    first_mismatch,
)
from pytest_distcompat.launch.forensics.stacks import without_launcher
from pytest_distcompat.spread import Hosts

#: The message about a rank whose process never logged anything.
NEVER_STARTED = "never started"
#: The statuses of ranks that did not end well (see ``RankEnd``), with their position in a report:
#: causes first, consequences last. Those with the same number are ordered by time.
_ORDER = {
    "raised": 0,
    "killed": 0,
    "exited": 0,
    "missing": 1,
    "stuck": 2,
    "excused": 3,
    "lost peer": 4,
    "stopped": 5,
}
#: The address of an object in its repr: ``0x7fd053081dd0``.
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    The status is one of:

    - ``done``: the rank did its work.
    - ``raised``: it logged an exception.
    - ``excused``: it logged an exception that its test allows, a skip or an expected failure. Only
      ``plugin/marked/merge`` sets this status.
    - ``killed``, ``exited``: its process ended, by a signal or by an exit code, before the rank
      could log anything. A rank whose node was lost counts as killed.
    - ``stuck``: it was still running at the time limit, and was killed.
    - ``missing``: its process never logged anything.
    - ``lost peer``: a consequence. It raised only because another rank was gone.
    - ``stopped``: a consequence. It was ended because another rank had failed.
    """

    rank: int
    status: str
    #: What happened, to be read after "rank 1": ``raised ValueError: no such name``.
    message: str = ""
    #: More lines about it: the traceback, or the usual causes of the signal.
    text: str = ""
    #: The type of the exception (``ValueError``), or ``skip`` or ``xfail``; empty without one.
    kind: str = ""
    #: When it failed, in seconds of CLOCK_MONOTONIC, which the processes of a machine share.
    time: float = 0.0
    #: The Python stacks that it wrote at the time limit, or when another rank gave up waiting for
    #: it. The text is that of ``faulthandler``.
    stack: str = ""
    #: For a stuck rank: where it was, and the collective that it waits in, such as ``all_reduce``,
    #: read from ``stack`` and from torch's flight recorder; None if it wrote no stack.
    wait_state: WaitState | None = None
    #: The last lines of its stdout and stderr.
    output: str = ""
    #: Whether its exception only says that another rank is gone, as "Connection closed by peer".
    lost: bool = False
    #: The last event that it logged.
    last: Event | None = None
    #: The name of its machine in a run over several, as ``n2``; empty on one machine.
    node: str = ""

    @property
    def who(self) -> str:
        """The rank, and its node in a run of several: ``rank 3 on n2``."""
        if not self.node:
            return f"rank {self.rank}"
        return f"rank {self.rank} on {self.node}"


@dataclass(frozen=True)
class Ending:
    """How all ranks of a run ended, and what each wrote."""

    #: The end of each rank, in the order of the ranks.
    ranks: tuple[RankEnd, ...]
    #: By rank, all events that it logged.
    events: Mapping[int, Sequence[Event]]
    #: How long the run took, and its time limit.
    seconds: float = 0.0
    timeout: float = 0.0
    #: Whether ranks were killed at the time limit.
    timed_out: bool = False
    #: What went wrong outside of the ranks, as the death of the launcher process. The last line is
    #: the headline, and the lines before it show the launcher's output.
    launch_error: str = ""
    #: What the user should know although nothing failed, as why ranks started slowly.
    notice: str = ""
    #: Processes that ranks left running and that were killed: ``sleep (pid 4711)``.
    left_over: tuple[str, ...] = ()
    #: What stayed in use of the devices after the ranks were gone. A leak is a failure even if all
    #: ranks ended well.
    leaks: tuple[str, ...] = ()
    #: The command with which a user repeats the run by hand.
    command: str = ""
    #: The lock of a build of a torch extension for which a stuck rank waited, and its holder.
    builds: str = ""
    #: Properties to add to the report of a marked test, by name.
    properties: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def not_launched(cls, world_size: int, problem: str) -> Ending:
        """Return the ending of a run whose launcher failed before any rank started."""
        ends = [RankEnd(rank, "missing", message=NEVER_STARTED) for rank in range(world_size)]
        no_events: dict[int, Sequence[Event]] = dict.fromkeys(range(world_size), ())
        return cls(tuple(ends), no_events, launch_error=problem)

    @property
    def failed(self) -> bool:
        """Tell whether anything at all went wrong."""
        return bool(self.leaks) or self._ranks_failed

    @property
    def _ranks_failed(self) -> bool:
        if self.launch_error or self.timed_out:
            return True
        return any(end.status != "done" for end in self.ranks)

    @property
    def kind(self) -> str:
        """Return the worst that happened to any rank.

        It is one of ``ok``, ``raised``, ``leaked``, ``hung`` and ``crashed``. Only ``raised`` may
        be an expected failure. So a leak, a hang or a crash of another rank hides an exception.
        """
        statuses = {end.status for end in self.ranks} - {"done"}
        if self.launch_error or statuses & {"killed", "exited", "missing"}:
            return "crashed"
        if self.timed_out:
            return "hung"
        if statuses and not statuses & {"raised", "excused", "lost peer"}:
            # "stopped" alone: no rank is the cause, and no exception explains the end.
            return "crashed"
        if self.leaks:
            return "leaked"
        return "raised" if statuses else "ok"

    @property
    def cause(self) -> RankEnd | None:
        """The rank that failed first."""
        failed = self.in_order()
        return failed[0] if failed else None

    def in_order(self) -> list[RankEnd]:
        """Return the ranks that did not end well, the cause first.

        The order is that of ``_ORDER``. Stuck ranks that wait in a collective come after stuck
        ranks that do not, since the latter are what the others wait for.
        """

        def position(end: RankEnd) -> tuple[int, bool, float, int]:
            # ``waits`` is the name of the collective, empty outside of one.
            waits = end.wait_state is not None and end.wait_state.waits != ""
            return _ORDER[end.status], waits, end.time, end.rank

        failed = [end for end in self.ranks if end.status != "done"]
        return sorted(failed, key=position)

    def headline(self) -> str:
        """Return one line: which rank, and what happened to it.

        If all ranks ended well, it says what leaked.
        """
        if self.leaks and not self._ranks_failed:
            return "; ".join(self.leaks)
        if self.launch_error:
            message = self.launch_error.strip().splitlines()[-1]
            # A rank that started has logged an event.
            any_started = any(self.events.values())
            return message if any_started else f"the ranks could not be started: {message}"
        cause = self.cause
        if cause is None:
            if self.timed_out:
                return (
                    f"time limit of {self.timeout:g} s passed "
                    "while the ranks were leaving, all of them done"
                )
            return "all ranks ended well"
        if self.timed_out and cause.status == "stuck":
            return self._hang()
        return f"{cause.who} {cause.message}"

    def _hang(self) -> str:
        """Return one line on a run in which ranks hang: where they are, and how they disagree.

        For example ``time limit of 30 s: different collectives: rank 0 waits in all_reduce (...) at
        train.py:12; rank 1 waits in barrier (...) at train.py:14``.
        """
        parts = [f"time limit of {self.timeout:g} s"]
        # How the collectives of two ranks disagree, such as ``different collectives``.
        mismatch = first_mismatch(self._wait_states)
        if mismatch is not None:
            parts.append(mismatch.kind)
        waits = describe_wait_states(self._wait_states)
        # With the names of machines, if there are several: ``rank 1 on n2``.
        parts.append(self.hosts.name_in(waits))
        if self.builds:
            parts.append(self.builds)
        return ": ".join(parts)

    @property
    def hosts(self) -> Hosts:
        """The machine of each rank, if the run is not on this one."""
        by_rank = sorted(self.ranks, key=lambda end: end.rank)
        names = tuple(end.node for end in by_rank)
        if not any(names):
            return Hosts()
        return Hosts(names)

    def without_hosts(self) -> Ending:
        """Return the same ending without the names of machines, as of a run on one machine.

        A verdict must not depend on which machines there are, so the runner stores this text.
        """
        ends = [replace(end, node="") for end in self.ranks]
        return replace(self, ranks=tuple(ends))

    @property
    def _wait_states(self) -> dict[int, WaitState | None]:
        """Where each rank that hangs was at the time limit; None if it gave no stack."""
        return {end.rank: end.wait_state for end in self.ranks if end.status == "stuck"}

    def text(self) -> str:
        """Return the whole report: headline, causes, consequences, left processes, leaks.

        Ranks with the same story share a section::

            rank 2 raised ValueError: the same

            --- ranks 0 and 2: raised ValueError: the same ---
            Traceback ...

            consequences:
              rank 1 raised RuntimeError: Connection closed by peer
        """
        if self.leaks and not self._ranks_failed:
            return "\n\n".join(self.leaks)
        parts = [self.headline()]
        mismatch = first_mismatch(self._wait_states)
        if mismatch is not None:
            parts.append(self.hosts.name_in(str(mismatch)))
        if self.launch_error:
            parts.append(self.launch_error)
        consequences = []
        causes = []
        for end in self.in_order():
            if end.status in {"lost peer", "stopped"}:
                consequences.append(end)
            else:
                causes.append(end)
        parts += map(str, _sections(causes))
        parts += _describe_consequences(consequences)
        if self.left_over:
            parts.append("left running by a rank, now killed: " + ", ".join(self.left_over))
        parts = [part.rstrip() for part in parts]
        return "\n\n".join([*parts, *self.leaks])


@dataclass
class _Section:
    """A section of the report: ranks that ended in the same way.

    ``message`` is for the section's title, and ``body`` holds the lines below it.
    """

    message: str
    body: str
    ends: list[RankEnd]

    def __str__(self) -> str:
        title = f"--- {_name_ends(self.ends)}: {self.message} ---"
        if not self.body:
            return title
        return f"{title}\n{self.body}"


def _sections(ends: Sequence[RankEnd]) -> list[_Section]:
    """Return the sections of these ranks; ranks with the same message and body share one."""
    sections_by_story: dict[str, _Section] = {}
    for end in ends:
        section = _Section(_first_line(end.message), _section_body(end), [])
        # Objects lie at other addresses in each process, and tracebacks of pytest show the repr of
        # fixtures. Without the addresses the stories of two ranks are equal.
        story = _ADDRESS.sub("", f"{section.message}\n{section.body}")
        shared_section = sections_by_story.setdefault(story, section)
        shared_section.ends.append(end)
    return list(sections_by_story.values())


def _section_body(end: RankEnd) -> str:
    """Return what a rank left: its traceback, its last collectives, its stack and its output."""
    lines = []
    if end.text:
        lines.append(end.text.rstrip())
    # The last collectives that torch's flight recorder has of the rank.
    if end.wait_state is not None and end.wait_state.recorded:
        lines.append(end.wait_state.history())
    if end.status == "stuck":
        # Only the frames of the test or the trainer.
        stack = without_launcher(end.stack)
        if stack:
            lines.append(f"Python stack at the time limit (most recent call first):\n{stack}")
    if end.output and end.status in {"killed", "exited", "stuck", "missing"}:
        lines.append("last output:\n" + end.output.rstrip())
    return "\n".join(lines)


def _describe_consequences(ends: Sequence[RankEnd]) -> list[str]:
    """Return the parts of the report on ranks that ended because another one did.

    The first part lists them, a line each. A rank for which another one gave up waiting has a part
    of its own with its stack.
    """
    if not ends:
        return []
    lines = [f"  {end.who} {_first_line(end.message)}" for end in ends]
    parts = ["\n".join(["consequences:", *lines])]
    for end in ends:
        stack = without_launcher(end.stack)
        if stack:
            title = (
                f"where {end.who} was when another one gave up waiting (most recent call first):"
            )
            parts.append(f"{title}\n{stack}")
    return parts


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as a text: ``rank 1``, or ``ranks 0, 1 and 3``."""
    *most, last = map(str, sorted(ranks))
    if not most:
        return f"rank {last}"
    listed = ", ".join(most)
    return f"ranks {listed} and {last}"


def _name_ends(ends: Sequence[RankEnd]) -> str:
    """Return the ranks as a text, by node in a run of several.

    Example: ``ranks 0 and 1 on n1, rank 2 on n2``.
    """
    ranks_by_node: dict[str, list[int]] = {}
    for end in ends:
        ranks_by_node.setdefault(end.node, []).append(end.rank)
    names = []
    for node, ranks in ranks_by_node.items():
        name = name_ranks(ranks)
        if node:
            name += f" on {node}"
        names.append(name)
    return ", ".join(names)


def current_action(events: Sequence[Event]) -> Action | None:
    """Return the action that a rank has begun and not finished; None if it is in none.

    An action is one step of a rank's work, such as ``build``, ``step`` or ``save``. The snapshot
    that the rank logs after an action marks the action's end.
    """
    current: Action | None = None
    for event in events:
        if isinstance(event, Action):
            current = event
        elif isinstance(event, SnapshotTaken):
            current = None
    return current


def exit_name(code: int | None) -> str:
    """Return an exit code as text: ``exit code 1``, or ``SIGKILL`` for -9."""
    if code is None:
        return "exit code unknown"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
