"""Random number generators of a rank.

A fork inherits all generators as they are; a fresh process has its own.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

#: By name, the states of the generators that were seeded while the session was collected.
_seeded: dict[str, Any] = {}


def states() -> dict[str, Any]:
    """Return the states of the global generators of Python, numpy and torch.

    Only those that are imported have one.
    """
    by_name: dict[str, Any] = {"random": random.getstate()}
    # A module that is still being imported may lack the function.
    state_of_numpy = getattr(sys.modules.get("numpy.random"), "get_state", None)
    if state_of_numpy is not None:
        by_name["numpy"] = state_of_numpy()
    state_of_torch = getattr(sys.modules.get("torch"), "get_rng_state", None)
    if state_of_torch is not None:
        by_name["torch"] = state_of_torch()
    return by_name


def remember_seeds(before: dict[str, Any]) -> None:
    """Find which generators were seeded since they were in those states, and not merely drawn from.

    pytest-random-order draws a number wherever pytest is configured; ranks that all went on from
    there would draw the same ones.
    """
    after = states()
    for name, state in before.items():
        if _SEEDS[name](state, after[name]):
            _seeded[name] = after[name]


def drawn(name: str, before: Any, after: Any) -> bool:
    """Tell whether numbers were drawn from that generator between these states of it.

    A generator that was given a seed in between does not count.
    """
    if name == "torch":
        same = sys.modules["torch"].equal(before, after)
    elif name == "numpy":
        same_words = bool((before[1] == after[1]).all())
        same_position = before[2] == after[2]
        same = same_words and same_position
    else:
        same = before == after
    return not same and not _SEEDS[name](before, after)


def renew() -> None:
    """Give this rank generators as a fresh process has them.

    Those that a module seeded when it was imported stay as they are. A fork inherits torch's and
    numpy's generators as they are, so all ranks would draw the same, and Python seeds its own anew.
    A rank that does several requests gets new generators for each.
    """
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy.random")
    if "random" in _seeded:
        random.setstate(_seeded["random"])
    else:
        random.seed()
    if "numpy" in _seeded:
        numpy.set_state(_seeded["numpy"])
    elif numpy is not None:
        numpy.seed()
    if "torch" in _seeded:
        torch.set_rng_state(_seeded["torch"])
        # A fork seeds CUDA as the import did, once CUDA is initialised; an earlier request may have
        # drawn since.
        torch.cuda.manual_seed_all(torch.initial_seed())
    elif torch is not None:
        torch.default_generator.seed()
        if torch.cuda.is_initialized():
            torch.cuda.seed_all()


#: The words that a Mersenne Twister makes at a time.
_WORDS = 624
#: How often a generator is drawn from to see whether that leads from one state to another. No
#: module draws forty thousand numbers at import.
_MOST_DRAWS = 64


def _seeds_of_python(before: Any, after: Any) -> bool:
    """Tell whether Python's generator was seeded between these states.

    Drawing alone does not lead from one to the other.
    """
    replay = random.Random()  # noqa: S311 - it repeats what another one drew
    replay.setstate(before)
    return not _reached(
        after[1], lambda: replay.getstate()[1], lambda: replay.getrandbits(32 * _WORDS)
    )


def _seeds_of_numpy(before: Any, after: Any) -> bool:
    """Tell whether numpy's generator was seeded between these states, as above."""
    replay = importlib.import_module("numpy.random").RandomState()
    replay.set_state(before)
    return not _reached(after[1], lambda: replay.get_state()[1], lambda: replay.bytes(4 * _WORDS))


def _reached(
    goal: Sequence[int], state: Callable[[], Sequence[int]], draw: Callable[[], object]
) -> bool:
    """Tell whether a generator gets to a state by drawing alone.

    It may use up any number of words of its state.
    """
    goal_words = list(goal[:_WORDS])
    for _ in range(_MOST_DRAWS):
        words = state()[:_WORDS]
        if list(words) == goal_words:
            return True
        draw()
    return False


def _seeds_of_torch(before: Any, after: Any) -> bool:
    """Tell whether the generator was seeded between these states: a state holds the seed."""
    replay = sys.modules["torch"].Generator()
    first_seed = int(replay.set_state(before).initial_seed())
    last_seed = int(replay.set_state(after).initial_seed())
    return first_seed != last_seed


#: By the name of each generator: what tells whether it was seeded between two states.
_SEEDS = {"random": _seeds_of_python, "numpy": _seeds_of_numpy, "torch": _seeds_of_torch}
