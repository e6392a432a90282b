"""Events that only ranks of scripts write to their logs."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_distcompat.events import Event


@dataclass(frozen=True)
class Stopped(Event, name="stopped"):
    """The rank has written the checkpoint after which all ranks exit as if preempted."""


@dataclass(frozen=True)
class TrainsOn(Event, name="trains on"):
    """The rank goes on after the step at which the run may be stopped.

    Attributes:
        saved: Whether the rank has written a file at that step.
    """

    saved: bool


@dataclass(frozen=True)
class ProbeFailed(Event, name="probe failed"):
    """The probe itself failed, and records nothing from then on.

    Attributes:
        where: The call of the script that it observed.
        text: The traceback.
    """

    where: str
    text: str


@dataclass(frozen=True)
class Bridged(Event, name="bridge"):
    """The CPU bridge has changed a library."""

    what: str


@dataclass(frozen=True)
class UnseenModel(Event, name="unseen model"):
    """An optimizer, whose type is ``optimizer``, stepped on a model that nothing wraps."""

    optimizer: str


@dataclass(frozen=True)
class Saved(Event, name="saved"):
    """A file or directory was saved.

    Attributes:
        path: Its path.
        index: The index of the snapshot after which it was saved.
        everyone: Whether all ranks saved it together, rather than one.
        model: Whether it should hold the model.
    """

    path: str
    index: int
    everyone: bool
    model: bool = False


@dataclass(frozen=True)
class Output(Event, name="output"):
    """A trainer has this output directory."""

    path: str
