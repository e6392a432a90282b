"""Cells and checks that ranks which share a GPU cannot run through gloo.

*Ranks* are the processes of a process group. Some versions of NCCL refuse two ranks on one GPU.
Their group then uses the backend gloo, which can do less with tensors on a GPU. A *cell* is a
configuration with an id such as ``fsdp2-fp32-w2-tp_2``: strategy, precision, 2 ranks, options. A
*check* is a claim about a cell. ``suite.why_not`` asks ``why_not_through_gloo`` and skips what
cannot run.

torch documents all_reduce and broadcast alone for gloo with tensors on a GPU
(https://docs.pytorch.org/docs/stable/distributed.html#backends). On an H100 DDP, ZeRO and sharded
FSDP2 trained with it; the rest below ended with SIGSEGV or ``writev: Bad address`` (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.launch.nccl import CURE
from pytest_distcompat.strategies import STRATEGIES


@dataclass(frozen=True)
class Limit:
    """Something that gloo cannot do on a GPU.

    Attributes:
        needs: Tells whether a cell needs it.
        words: What it is, for a message: ``gather activations``.
        checks: The checks that need it in such a cell; empty if the cell itself does.
    """

    needs: Callable[[Cell], bool]
    words: str
    checks: tuple[str, ...] = ()


def _exchanges_activations(cell: Cell) -> bool:
    """Tell whether ranks exchange activations.

    They do if layers (tp), sequences (cp) or experts (ep) are spread over them.
    """
    return max(cell.tp, cell.cp, cell.ep) > 1


def _is_fsdp(cell: Cell) -> bool:
    """Tell whether the strategy is FSDP1 or FSDP2, sharded over all ranks or over some."""
    return STRATEGIES.get(cell.strategy).wrapper.startswith("FSDP")


def _saves_full_state_dict(cell: Cell) -> bool:
    """Tell whether FSDP gathers a full state dict for a checkpoint."""
    return _is_fsdp(cell) and cell.option("state_dict") == "full"


#: All that gloo cannot do. Pipeline stages (pp) send activations to each other.
LIMITS = (
    Limit(lambda cell: cell.pp > 1, "send activations from stage to stage"),
    Limit(_exchanges_activations, "gather activations"),
    Limit(_saves_full_state_dict, "gather whole tensors for a full state dict"),
    # The check ``observers`` looks at the trainer before and after a save and an export.
    Limit(_is_fsdp, "gather whole tensors for an export", checks=("export", "observers")),
)


def why_not_through_gloo(cell: Cell, check: str = "") -> str | None:
    """Return why ranks that share a GPU cannot run the cell through gloo; None if they can.

    Args:
        cell: The cell.
        check: The name of a check, to ask for that check in the cell; empty to ask for the cell
            itself.
    """
    for limit in LIMITS:
        if limit.checks and check not in limit.checks:
            continue
        if limit.needs(cell):
            # ``CURE`` says which NCCL takes ranks that share a GPU.
            return f"gloo cannot {limit.words} on a GPU. {CURE}"
    return None
