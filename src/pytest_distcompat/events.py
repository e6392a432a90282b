"""Events that a rank logs: typed, a line of JSON each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from pytest_distcompat.decode import decode, prepare


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of a rank's log; ``RankLog.write`` fills in the attributes that all events have.

    Attributes:
        name: The kind of event, as the line has it.
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
        """Return the fields as plain data, without those that all events have."""
        return {name: value for name, value in vars(self).items() if name not in _COMMON}


_COMMON = {field.name for field in fields(Event)}


@dataclass(frozen=True)
class Start(Event, name="start"):
    """The first event of a rank.

    One of a script also has how it was started. ``oom_kills``: see ``deaths``.
    """

    pid: int
    oom_kills: int | None = None
    python: str = ""
    argv: tuple[str, ...] = ()
    cwd: str = ""


@dataclass(frozen=True)
class Action(Event, name="action"):
    """The rank begins an action of its run, the ``index``-th."""

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
    """The last event of a rank that ended well.

    If ``pid`` is not the rank's, a forked child wrote it.
    """

    pid: int | None = None


@dataclass(frozen=True)
class Exit(Event, name="exit"):
    """The last event of a script's rank that ends by ``sys.exit``.

    The ``code`` is not 0.
    """

    code: int


@dataclass(frozen=True)
class Raised(Event):
    """The rank raised an exception. ``lost``: it only says that another rank is gone.

    ``cut``: the rank's connections were cut to make it finish.
    """

    kind: str
    message: str
    text: str
    lost: bool = False
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

    event: str
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
    """Tell whether the rank waits for the others' end, or did so to its own."""
    return bool(events) and isinstance(events[-1], Excused)


def pids_of(events: Mapping[int, Sequence[Event]]) -> dict[int, int]:
    """Return the process numbers of the ranks that started."""
    pid_by_rank: dict[int, int] = {}
    for rank, logged in events.items():
        if logged and isinstance(logged[0], Start):
            pid_by_rank[rank] = logged[0].pid
    return pid_by_rank


def decode_event(data: Any) -> Event | None:
    """Return the event of a line of JSON, decoded; None if it is none."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        if isinstance(data, dict) and isinstance(data.get("event"), str):
            kind = Event.kinds.get(data["event"])
            if kind is not None:
                return decode(kind, data)
            common = {name: data.pop(name) for name in _COMMON & set(data)}
            return Note(data.pop("event"), data, **common)
    return None


prepare(*Event.kinds.values())
