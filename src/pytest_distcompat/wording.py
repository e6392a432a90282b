"""Words that findings share: how they name ranks, and say that there are more of a kind.

A finding is one sentence of a failed check. Checks, the launcher and reports use these functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def named_ranks(ranks: Sequence[int], world_size: int) -> str:
    """Return the words for some ranks in a finding: "all ranks", "rank 1" or "ranks 0, 2"."""
    if len(ranks) == world_size:
        return "all ranks"
    return listed_ranks(ranks)


def listed_ranks(ranks: Sequence[int | str]) -> str:
    """Return the words for some ranks: ``rank 1``, ``ranks 0, 2``."""
    numbers = ", ".join(str(rank) for rank in ranks)
    if len(ranks) > 1:
        return f"ranks {numbers}"
    return f"rank {numbers}"


def and_others(names: Iterable[str]) -> str:
    """Return the first of some names in alphabetical order, and how many others there are.

    The text is ``'bias'`` or ``'bias' and 2 others``. There must be a name.
    """
    first, *others = sorted(names)
    if not others:
        return repr(first)
    return f"{first!r} and {len(others)} others"
