"""Does a checkpoint work in a directory with any name?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, only_where_it_differs
from pytest_distcompat.checks._values import differences, flat_parameters, settings, values
from pytest_distcompat.scenario import NAMED_RUN, PATHS
from pytest_distcompat.trace import Trace


@check(
    scenario=PATHS,
    costly=True,
    until=(("named", "step", 1), ("reopened", "step", 0)),
    order=14,
    not_applicable=only_where_it_differs,
    depends_on=frozenset(),
)
def paths(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that saving to and loading from a directory with an unusual name restores everything bit by bit.

    The name has spaces, parent directories, non-ASCII letters, ``pytorch_model_fsdp`` and ``optimizer``.

    If it fails: a file is probably found by a word anywhere in its path
    (https://github.com/huggingface/accelerate/pull/4119).
    """
    named, reopened = trace.run("named"), trace.run("reopened")
    saved, loaded = named.at("save"), reopened.at("load")
    when = f"after the load from {NAMED_RUN.directory!r}"
    yield from every_rank(saved, cell.world_size, "save")
    yield from every_rank(loaded, cell.world_size, "load")
    if not flat_parameters(saved):
        yield from differences(values(named, saved), values(reopened, loaded), when)
    yield from settings(saved, loaded, when)
