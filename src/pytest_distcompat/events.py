"""Events that a rank logs: typed, a line of JSON each.

Each rank appends events to a file of its own while it runs (``launch.rank_log.RankLog.write``).
pytest's process reads the files of all ranks: for snapshots of what they recorded, and to find out
which rank failed first, in which action. A rank of a suite that ends well logs::

    {"event": "start", "rank": 0, "time": 12.1, "memory": 310000000, "pid": 4711, ...}
    {"event": "action", "rank": 0, "time": 12.2, "memory": ..., "action": "build", "index": 1}
    {"event": "snapshot", "rank": 0, ..., "action": "build", "index": 1, "snapshot": {...}}
    {"event": "done", "rank": 0, ..., "pid": 4711}

A rank that crashes or hangs leaves a log without ``done`` and ``error``: its last ``action`` says
where it was. Extensions log events of other names, which are read as ``Note``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from pytest_distcompat.decode import decode, prepare


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of a rank's log; ``RankLog.write`` fills in the attributes that all events have.

    A subclass names its line: ``class Start(Event, name="start")``.

    Attributes:
        name: The kind of event, which the line has as ``event``.
        kinds: Each name with its class.
        rank: The rank that wrote it.
        time: When, by CLOCK_MONOTONIC, which all processes of a machine share: it orders events
            across ranks.
        memory: The resident memory of the rank then, in bytes.
    """

    name: ClassVar[str]
    kinds: ClassVar[dict[str, type[Event]]] = {}

    rank: int = -1
    time: float = 0.0
    memory: int = 0

    def __init_subclass__(cls, name: str = "") -> None:
        """Have lines of that name decoded as events of this class."""
        if name:
            cls.name = name
            cls.kinds[name] = cls

    def own_fields(self) -> Mapping[str, Any]:
        """Return the fields that only this kind has: ``{"action": "step", "index": 2}``.

        ``RankLog.write`` puts them on the line, beside those that all events have.
        """
        return {name: value for name, value in vars(self).items() if name not in _COMMON}


_COMMON = {field.name for field in fields(Event)}


@dataclass(frozen=True)
class Start(Event, name="start"):
    """The first event of a rank."""

    pid: int
    #: How many processes the kernel had killed for lack of memory; None if unknown. A higher number
    #: after a rank has died is the cause of its death (``launch.forensics.deaths``).
    oom_kills: int | None = None
    # How a rank of a user's script was started.
    #: The interpreter.
    python: str = ""
    #: ``sys.argv``.
    argv: tuple[str, ...] = ()
    #: The working directory.
    cwd: str = ""


@dataclass(frozen=True)
class Action(Event, name="action"):
    """The rank begins an action of its run, such as ``step``: the ``index``-th, from 0."""

    action: str
    index: int


@dataclass(frozen=True)
class SnapshotTaken(Event, name="snapshot"):
    """The rank has finished an action; ``snapshot`` is a ``trace.Snapshot`` as plain data."""

    action: str
    index: int
    snapshot: Mapping[str, Any]


@dataclass(frozen=True)
class Done(Event, name="done"):
    """The last event of a rank that ended well."""

    #: The process that wrote it. If it is not the rank's, a child that the rank forked wrote it,
    #: and the rank itself has not ended well.
    pid: int | None = None


@dataclass(frozen=True)
class Exit(Event, name="exit"):
    """A rank of a user's script has called ``sys.exit`` with a ``code`` other than 0.

    The rank writes it in place of ``Done`` or ``Error``, as its last event.
    """

    code: int


@dataclass(frozen=True)
class Raised(Event):
    """The rank raised an exception."""

    #: The class of the exception: ``RuntimeError``.
    kind: str
    #: Its message, in one line.
    message: str
    #: Its traceback.
    text: str
    #: Whether it only says that another rank is gone: then that rank is the cause.
    lost: bool = False
    #: Whether the plugin closed connections between ranks, so that a collective that waited for a
    #: peer failed (``ext/inside``): the exception may be due to that.
    cut: bool = False


@dataclass(frozen=True)
class Error(Raised, name="error"):
    """The last event of a failing rank."""


@dataclass(frozen=True)
class Excused(Raised, name="excused"):
    """The rank has left its test as the test allows (a skip, an expected failure).

    It waits for the others' end. If it is a rank's last event, it counts as an error of that
    ``kind``.
    """


@dataclass(frozen=True)
class Resumed(Event, name="resumed"):
    """A rank that was excused goes on with the others."""


@dataclass(frozen=True)
class Note(Event):
    """An event of any other name, with its fields as plain data."""

    #: The name.
    event: str
    #: The fields that only this event has.
    data: Mapping[str, Any]

    def own_fields(self) -> Mapping[str, Any]:
        """Return the data."""
        return self.data


_E = TypeVar("_E", bound=Event)


def of_kind(kind: type[_E], events: Iterable[Event]) -> list[_E]:
    """Return the events of that kind, in order."""
    return [event for event in events if isinstance(event, kind)]


def has_ended(events: Iterable[Event]) -> bool:
    """Tell whether the rank has logged its last event."""
    return any(isinstance(event, (Done, Error)) for event in events)


def is_excused(events: Sequence[Event]) -> bool:
    """Tell whether the rank waits for the others' end, or was waiting when it ended itself."""
    return bool(events) and isinstance(events[-1], Excused)


def pids_of(events: Mapping[int, Sequence[Event]]) -> dict[int, int]:
    """Return the process numbers of the ranks that started."""
    pid_by_rank: dict[int, int] = {}
    for rank, logged in events.items():
        if logged and isinstance(logged[0], Start):
            pid_by_rank[rank] = logged[0].pid
    return pid_by_rank


def decode_event(data: Any) -> Event | None:
    """Return the event of a decoded line of JSON; None for a line that is no event.

    A line may be half written when its rank is killed, and is passed over then.
    """
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        if isinstance(data, dict) and isinstance(data.get("event"), str):
            kind = Event.kinds.get(data["event"])
            if kind is not None:
                return decode(kind, data)
            common = {name: data.pop(name) for name in _COMMON & set(data)}
            return Note(data.pop("event"), data, **common)
    return None


# Now, because later a test may have broken what decoding needs.
prepare(*Event.kinds.values())
