"""Matrices: a few lists that become many cells.

An adopter declares a ``Matrix`` in a suite. ``Matrix(strategies=("ddp", "fsdp2"),
precisions=("fp32", "bf16_upcast"))`` has four cells on the number of ranks that the session says:
``ddp-fp32-w2``, ``ddp-bf16_upcast-w2``, ``fsdp2-fp32-w2`` and ``fsdp2-bf16_upcast-w2``.
``profiles`` and ``engine`` call ``Matrix.cells``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pytest_distcompat.cell.cell import Cell
from pytest_distcompat.cell.options import OptionValue, check_option
from pytest_distcompat.failures import hides_frames
from pytest_distcompat.user_input import check_count

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html. With it the
#: traceback of a UsageProblem begins in the user's code.
__tracebackhide__ = hides_frames


@dataclass(frozen=True)
class Matrix:
    """Cells that a suite covers: strategies x precisions x world sizes x sets of options.

    Without ``strategies`` or ``precisions``, all known ones are meant; without ``world_sizes``, the
    world size of this session (``--distcompat-world-size``). ``extra`` adds single cells, or other
    matrices, beside the product. ``nodes`` is over how many machines the ranks of each cell are
    spread; without it the session says.
    """

    strategies: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    world_sizes: tuple[int, ...] = ()
    options: tuple[Mapping[str, OptionValue], ...] = ({},)
    extra: tuple[Cell | Matrix, ...] = ()
    nodes: int | None = None

    def __post_init__(self) -> None:
        for name in ("strategies", "precisions", "world_sizes", "options", "extra"):
            value = getattr(self, name)
            if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
                raise TypeError(f"Matrix({name}=...) takes a tuple, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        for world_size in self.world_sizes:
            check_count("Matrix(world_sizes=...)", world_size)
        if self.nodes is not None:
            check_count("Matrix(nodes=...)", self.nodes)
        if not self.options:
            # ``options=()`` means cells without options; an empty product would have no cells.
            object.__setattr__(self, "options", ({},))
        for options in self.options:
            for name, value in options.items():
                check_option(name, value)

    def counts_of_session(self) -> set[str]:
        """Return the counts that the session sets for all cells.

        These are the ones that the matrix does not name: ``world_size``, ``nodes``.
        """
        counts: set[str] = set()
        if not self.world_sizes:
            counts.add("world_size")
        if not self.nodes:
            counts.add("nodes")
        return counts

    def spread_as(self, other: Matrix) -> Matrix:
        """Return the same matrix over as many machines as the other one.

        A matrix that names a number of machines itself keeps it.
        """
        return self if self.nodes else dataclasses.replace(self, nodes=other.nodes)

    def cells(
        self, strategies: Iterable[str], precisions: Iterable[str], world_size: int
    ) -> Iterator[Cell]:
        """Yield the cells, each once, in a fixed order.

        The arguments stand in for what the matrix does not name.
        """
        strategies = tuple(strategies)
        precisions = tuple(precisions)
        product = itertools.product(
            self.strategies or strategies,
            self.precisions or precisions,
            self.world_sizes or (world_size,),
            self.options,
        )
        cells: list[Cell] = []
        for strategy, precision, size, options in product:
            cell = Cell(strategy, precision, size, tuple(options.items()))
            cells.append(cell.spread_as(self))
        for extra in self.extra:
            if isinstance(extra, Cell):
                cells.append(extra.spread_as(self))
            else:
                cells.extend(extra.spread_as(self).cells(strategies, precisions, world_size))
        yield from dict.fromkeys(cells)
