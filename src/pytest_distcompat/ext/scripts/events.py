"""Events that only ranks of scripts write to their logs.

A *rank* is one of the processes that train together. Each writes a log, ``rank-0.jsonl``: one event
a line, as JSON. ``events`` has the events of all ranks, such as the start and the end. Those of
this module come from the probe, the code that records an unmodified script from inside its ranks.
The parent process reads them after the run (``result``), and other ranks while it runs
(``stopping``).
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_distcompat.events import Event


@dataclass(frozen=True)
class Stopped(Event, name="stopped"):
    """The rank has written the checkpoint after which all ranks exit as if preempted.

    A script is stopped so, and launched again, to see whether it resumes.
    """


@dataclass(frozen=True)
class TrainsOn(Event, name="trains on"):
    """The rank begins another step after the one at which the run is to be stopped.

    Ranks compare whether any of them has saved.

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
    """The CPU bridge (``bridge``) has changed a library: it runs a strategy without a GPU now."""

    #: Such as ``TrainingArguments use the CPU``.
    what: str


@dataclass(frozen=True)
class UnseenModel(Event, name="unseen model"):
    """An optimizer stepped on a model that nothing wraps, so the probe cannot see the model.

    The probe knows the models that DDP, FSDP, DeepSpeed and the like have wrapped.
    """

    #: The name of its type, such as ``AdamW``.
    optimizer: str


@dataclass(frozen=True)
class Saved(Event, name="saved"):
    """A file or directory was saved.

    Attributes:
        path: Its path.
        index: 100 times the steps taken until then, plus an offset: the index of the snapshot
            (record of model and optimizer) that belongs to the save.
        everyone: Whether all ranks saved it together, rather than one.
        model: Whether it should hold the model.
    """

    path: str
    index: int
    everyone: bool
    model: bool = False


@dataclass(frozen=True)
class Output(Event, name="output"):
    """The script has made a Trainer of transformers with this output directory."""

    #: The absolute path.
    path: str
