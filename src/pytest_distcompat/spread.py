"""Where the ranks of a run are: over how many machines they are spread, and which those are.

It is plain data about a launch, as torchrun has it, whatever starts the ranks. What starts them on
other machines is an extension's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from pytest_distcompat.wording import listed_ranks

#: Ranks by their numbers, as messages have them, whose machine is not said yet.
_RANKS = re.compile(r"\branks? (\d+(?:(?:, | and )\d+)*)\b(?! on | others| more)")


@dataclass(frozen=True, order=True)
class Spread:
    """How many ranks a run has, and over how many machines they are spread.

    Each machine has as many, and their numbers are in a row.

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

        It is rounded up if they are uneven.
        """
        return -(-self.world_size // self.nodes)

    def ranks_on(self, number: int) -> range:
        """Return the ranks on the machine of that number, from 0: torchrun's group rank."""
        first = number * self.local_size
        return range(first, first + self.local_size)

    @property
    def numbers(self) -> dict[str, int]:
        """Return its numbers by their names in marks and cells, one machine left out."""
        numbers = {"world_size": self.world_size}
        if not self.on_one:
            numbers["nodes"] = self.nodes
        return numbers

    @property
    def tokens(self) -> list[str]:
        """Return the parts that it has of a cell's id.

        They are ``w4``, and ``n2`` if it has two machines.
        """
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


#: The names of its numbers.
COUNTS = tuple(field.name for field in fields(Spread))


@dataclass(frozen=True)
class Hosts:
    """The name of each rank's machine, in rank order; no names in a run on one machine."""

    names: tuple[str, ...] = ()

    def name_in(self, text: str) -> str:
        """Return a text with the machine of each rank that it names.

        The text then reads ``ranks 0 and 1 on n1, rank 2 on n2``. Without names, and for ranks
        beyond, nothing changes.
        """
        if not self.names:
            return text
        return _RANKS.sub(self._with_names, text)

    def _with_names(self, match: re.Match[str]) -> str:
        ranks_by_host: dict[str, list[str]] = {}
        for rank in re.findall(r"\d+", match[1]):
            if int(rank) >= len(self.names):
                return match[0]
            ranks_by_host.setdefault(self.names[int(rank)], []).append(rank)
        parts: list[str] = []
        for host, ranks in ranks_by_host.items():
            parts.append(f"{listed_ranks(ranks)} on {host}")
        return ", ".join(parts)
