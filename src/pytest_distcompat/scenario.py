"""What the ranks are told to do: a scenario is one or more lives, a life is a list of verbs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Life:
    """One process group from start to end.

    ``verbs`` are done in order on every rank: ``plain`` (make the model, unwrapped), ``build``, ``step`` (one optimizer
    step), ``save``, ``load``, ``files`` (rank 0 reads what was saved). ``first_step`` is the number of the first step,
    so that a resumed life takes the batches that the first one took. ``after`` names the life whose checkpoint this
    one finds.
    """

    name: str
    verbs: tuple[str, ...]
    first_step: int = 0
    after: str = ""


@dataclass(frozen=True)
class Scenario:
    """Lives in order; scenarios that begin with the same lives share them."""

    name: str
    lives: tuple[Life, ...]


#: Three steps, a checkpoint, two more steps. Three, for the moments of Adam to differ from one another; two, because the
#: first loss after a load tells of the parameters only and the second of the optimizer state.
TRAIN_LIFE = Life("train", ("plain", "build", "step", "step", "step", "save", "step", "step", "files"))

#: A fresh process group loads what TRAIN_LIFE saved and takes the same two steps.
RESUME_LIFE = Life("resume", ("plain", "build", "load", "step", "step"), first_step=3, after="train")

TRAIN = Scenario("train", (TRAIN_LIFE,))
RESUME = Scenario("resume", (TRAIN_LIFE, RESUME_LIFE))

LIVES = {life.name: life for life in (TRAIN_LIFE, RESUME_LIFE)}
