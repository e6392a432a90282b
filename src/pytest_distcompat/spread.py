"""Over how many machines the ranks of a run are spread, and which machines those are.

``Spread`` is the numbers: 4 ranks over 2 machines. A cell (one point of the test matrix), a mark
and a request for ranks each have one, with torchrun's words ``world_size`` and ``nodes``.

``Hosts`` is the names. The trace of a run has it, and messages about ranks are given the names by
it: ``rank 2`` becomes ``rank 2 on n2``.

This is plain data, whatever starts the ranks. An extension starts them on other machines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from pytest_distcompat.wording import listed_ranks

#: Ranks in a message, such as ``ranks 0 and 1``. Not if a machine follows (``rank 2 on n2``), or if
#: the number counts something else (``12 others``, ``3 more``).
_RANKS = re.compile(r"\branks? (\d+(?:(?:, | and )\d+)*)\b(?! on | others| more)")


@dataclass(frozen=True, order=True)
class Spread:
    """How many ranks a run has, and over how many machines they are spread.

    Each machine has equally many ranks, with consecutive numbers: 0, 1 on the first of two, 2, 3 on
    the second.

    Attributes:
        world_size: The number of ranks: torchrun's ``WORLD_SIZE``.
        nodes: The number of machines: torchrun's ``--nnodes``.
    """

    world_size: int
    nodes: int = 1

    @property
    def on_one(self) -> bool:
        """Tell whether all ranks are on one machine."""
        return self.nodes == 1

    @property
    def local_size(self) -> int:
        """Return the number of ranks on each machine, torchrun's ``LOCAL_WORLD_SIZE``.

        It is rounded up if the machines do not divide the ranks.
        """
        return -(-self.world_size // self.nodes)

    def ranks_on(self, number: int) -> range:
        """Return the ranks on a machine; ``number`` counts from 0, as torchrun's group rank."""
        first = number * self.local_size
        return range(first, first + self.local_size)

    @property
    def numbers(self) -> dict[str, int]:
        """Return name -> number, as marks and cells have them: ``{"world_size": 4, "nodes": 2}``.

        A single machine is left out.
        """
        numbers = {"world_size": self.world_size}
        if not self.on_one:
            numbers["nodes"] = self.nodes
        return numbers

    @property
    def tokens(self) -> list[str]:
        """Return the parts of a cell's id: ``["w4"]``, or ``["w4", "n2"]`` over two machines."""
        tokens: list[str] = []
        for name, number in self.numbers.items():
            initial = name[0]
            tokens.append(f"{initial}{number}")
        return tokens

    @property
    def uneven(self) -> str | None:
        """Return why the ranks cannot be spread evenly; None if they can."""
        if self.world_size % self.nodes == 0:
            return None
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks} cannot be spread evenly over {self.nodes} nodes"


#: The names of the numbers of a ``Spread``: ``world_size`` and ``nodes``.
COUNTS = tuple(field.name for field in fields(Spread))


@dataclass(frozen=True)
class Hosts:
    """The machines of the ranks of a run."""

    #: The name of each rank's machine, in rank order: ``("n1", "n1", "n2", "n2")``. Empty for a run
    #: on one machine.
    names: tuple[str, ...] = ()

    def name_in(self, text: str) -> str:
        """Return a text in which each rank has the name of its machine.

        ``ranks 0, 1 and 2 differ`` becomes ``ranks 0, 1 on n1, rank 2 on n2 differ``. Nothing
        changes in a run on one machine.
        """
        if not self.names:
            return text
        return _RANKS.sub(self._with_names, text)

    def _with_names(self, match: re.Match[str]) -> str:
        """Return the replacement for the ranks that ``_RANKS`` matched."""
        ranks_by_host: dict[str, list[str]] = {}
        for rank in re.findall(r"\d+", match[1]):
            # The run has no such rank, so the number is about something else.
            if int(rank) >= len(self.names):
                return match[0]
            ranks_by_host.setdefault(self.names[int(rank)], []).append(rank)
        parts: list[str] = []
        for host, ranks in ranks_by_host.items():
            parts.append(f"{listed_ranks(ranks)} on {host}")
        return ", ".join(parts)
