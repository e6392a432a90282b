"""Check ``exchanges``: functions by which ranks exchange values give what they should.

An *exchange* is such a function: ``gather``, ``reduce``, ``pad_across_processes``. Users call it in
their own loop, for a log, a metric or their prompts. A driver, the class by which a trainer is
tested, lists them in ``Driver.exchanges``, each with a contract such as ``Gathers()``.

``judge.judge`` calls the check once its run has ended. It gets a cell, one point of the test matrix
such as ``ddp-fp32-w2``, and a trace with the run ``exchanges``: one process group, in which every
rank makes the same calls with many values. The values of all ranks are generated, so that each rank
also knows what it should get. It records an ``ExchangeInfo`` for each call: its value, what it
should get and what it got, as texts. The check yields findings, such as ``gather of bool: rank 1:
gets int64 (2,) [1, 0]; expected bool (2,) [True, False]``.

Arguments of the decorator ``check``: ``scenario`` has the run that the check reads; ``until`` the
last snapshot that it needs, as (run, action, which one of that action, from 0); ``order`` its place
in lists; ``not_applicable`` returns why a cell does not have the check, or None; ``depends_on`` has
the facets of a cell on which the outcome depends, so that of cells with equal facets the default
profile tests only one.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.checks.coverage import in_first_cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.scenario import EXCHANGES, MESH
from pytest_distcompat.trace import ExchangeInfo, Trace

#: How many characters of a value a finding shows.
SHOWN = 120


def _no_exchanges(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the cell does not have the check; None if it does."""
    if not driver.can("exchanges"):
        return "the driver has no exchanges()"
    if any(name in MESH for name, _ in cell.options):
        return "on a mesh ranks exchange values as they do without one, where it is tested"
    return in_first_cell(cell, driver, "ranks exchange values")


@check(
    scenario=EXCHANGES,
    until=(("exchanges", "exchanges", 0),),
    order=9,
    not_applicable=_no_exchanges,
    depends_on=frozenset({"world_size"}),
)
def exchanges(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that functions such as ``gather`` give each rank what they should, and change nothing.

    They are called with tensors of many dtypes and shapes, alone and in dicts, lists and tuples.

    If it fails: look for a dtype that is not kept (``new_zeros(...) + 0`` is int64 for bool), for
    ranks without elements, for a container of another type, for a value that is changed in place,
    and for the order of ranks.
    """
    snapshots = trace.run("exchanges").at("exchanges")
    yield from every_rank(snapshots, cell.world_size, "exchanges")
    for snapshot in snapshots:
        if not snapshot.exchanges:
            yield f"rank {snapshot.rank}: exchanges() names no function"
        for info in snapshot.exchanges:
            for text in _wrong(info):
                yield f"{info.exchange} of {info.value_name}: rank {snapshot.rank}: {text}"


def _wrong(info: ExchangeInfo) -> Iterator[str]:
    """Yield what is wrong with what a call gave a rank."""
    if info.error:
        yield f"{info.error[:SHOWN]}; expected {info.expected[:SHOWN]}"
    elif info.got != info.expected:
        got, expected = _shown(info.got, info.expected)
        yield f"gets {got}; expected {expected}"
    if info.changed:
        before, after = _shown(info.value, info.changed)
        yield f"it changes the value that it is called with from {before} to {after}"


def _shown(text: str, other: str) -> tuple[str, str]:
    """Return the parts of two texts around their first difference, which each has ``SHOWN`` of."""
    alike = 0
    for character, other_character in zip(text, other, strict=False):
        if character != other_character:
            break
        alike += 1
    start = max(0, alike - SHOWN // 4)
    # The beginning says what the value is.
    if start < SHOWN // 4:
        start = 0
    return _part(text, start), _part(other, start)


def _part(text: str, start: int) -> str:
    """Return a part of a text, with dots for what is left out."""
    part = text[start : start + SHOWN]
    if start:
        part = f"... {part}"
    if start + SHOWN < len(text):
        part = f"{part} ..."
    return part
