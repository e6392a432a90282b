"""Events that only ranks of scripts write to their logs."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_distcompat.events import Event


@dataclass(frozen=True)
class Stopped(Event, name="stopped"):
    """The rank has written its part of the checkpoint after which all ranks end as if they had been preempted."""


@dataclass(frozen=True)
class TrainsOn(Event, name="trains on"):
    """The rank is about to train on after the step at which the run may be stopped; ``saved``: it has written a file there."""

    saved: bool


@dataclass(frozen=True)
class ProbeFailed(Event, name="probe failed"):
    """The probe itself failed at a place, with a traceback, and sees no more from then on."""

    where: str
    text: str


@dataclass(frozen=True)
class Bridged(Event, name="bridge"):
    """The CPU bridge has changed a library."""

    what: str


@dataclass(frozen=True)
class UnseenModel(Event, name="unseen model"):
    """An ``optimizer`` of this type stepped, on a model that nothing wrapped."""

    optimizer: str


@dataclass(frozen=True)
class Saved(Event, name="saved"):
    """A file or directory was saved by one rank or by ``everyone``; ``model``: it should hold the model."""

    path: str
    index: int
    everyone: bool
    model: bool = False


@dataclass(frozen=True)
class Output(Event, name="output"):
    """A trainer has this output directory."""

    path: str
