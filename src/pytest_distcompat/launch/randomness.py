"""Give forked ranks random number generators as fresh processes have them.

A fork inherits the global generators of Python, numpy and torch as they are, so all ranks would
draw the same numbers. Each rank of torchrun has its own, unless a module calls, say,
``torch.manual_seed(0)`` at its import. So:

- ``preload.collect`` calls ``states`` before it imports the user's modules, and ``remember_seeds``
  after it, in the process from which ranks are forked;
- each rank calls ``renew`` when it starts (``rank``), and again between two requests
  (``ext/reuse``): generators that were seeded get that seed's state, the others a new seed.

``at_import`` uses ``drawn`` to find modules that draw random numbers at their import.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

#: By name (``random``, ``numpy`` or ``torch``), the states of the generators that were seeded while
#: the session was collected.
_seeded: dict[str, Any] = {}


def states() -> dict[str, Any]:
    """Return the states of the global generators of Python, numpy and torch, by name.

    The names are ``random``, ``numpy`` and ``torch``. A library that is not imported has no state.
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
    """Remember the states of generators that were seeded since ``states`` returned ``before``.

    A generator that was merely drawn from is not remembered. pytest-random-order, say, draws a
    number wherever pytest is configured, and ranks that all went on from there would draw the same
    numbers.
    """
    after = states()
    for name, state in before.items():
        if _SEEDS[name](state, after[name]):
            _seeded[name] = after[name]


def drawn(name: str, before: Any, after: Any) -> bool:
    """Tell whether numbers were drawn from that generator between these states of it.

    A generator that was given a seed in between does not count.

    Args:
        name: ``random``, ``numpy`` or ``torch``.
        before: The earlier state: a tuple for the first two, a tensor of bytes for torch.
        after: The later state.
    """
    if name == "torch":
        same = sys.modules["torch"].equal(before, after)
    elif name == "numpy":
        # The state is (name of the algorithm, words, position in the words, ...).
        same_words = bool((before[1] == after[1]).all())
        same_position = before[2] == after[2]
        same = same_words and same_position
    else:
        same = before == after
    return not same and not _SEEDS[name](before, after)


def renew() -> None:
    """Give this rank generators as a fresh process has them.

    Generators that a module seeded when it was imported get the state that they had after that. A
    rank that does several requests gets new generators for each.
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


#: How many words of 32 bits a Mersenne Twister, the generator of Python and numpy, makes at a time.
#: They are its state, and stay the same until all of them are drawn.
_WORDS = 624
#: How many times so many words are drawn, to see whether drawing leads from one state to another.
#: No module draws forty thousand numbers at import.
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
    """Tell whether numpy's generator was seeded between these states.

    Drawing alone does not lead from one to the other.
    """
    replay = importlib.import_module("numpy.random").RandomState()
    replay.set_state(before)
    return not _reached(after[1], lambda: replay.get_state()[1], lambda: replay.bytes(4 * _WORDS))


def _reached(
    goal: Sequence[int], state: Callable[[], Sequence[int]], draw: Callable[[], object]
) -> bool:
    """Tell whether a generator gets to a state by drawing alone.

    The position within the words does not matter: drawing may have used up any number of them.

    Args:
        goal: The words of the state to reach; what follows them is ignored.
        state: Returns the words of the generator's state.
        draw: Draws as many words as the state has.
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
