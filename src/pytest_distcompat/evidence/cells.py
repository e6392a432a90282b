"""Evidence from a cell's training: names, dtypes, mesh, losses and norms by step, memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import REDUCTIONS
from pytest_distcompat.checks.parity import tolerances
from pytest_distcompat.cost import sent_bytes, tensor_bytes
from pytest_distcompat.evidence.meshes import mesh
from pytest_distcompat.grouping import grouped
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.report.result import Row
from pytest_distcompat.scenario import SAVED
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import RunTrace, Snapshot, Trace

#: The most rows that the table of names has.
MAX_NAMES = 400


def add_training(row: Row, *runs: RunTrace) -> None:
    """Add the evidence of a training to the row of its cell, as far as the run got.

    Args:
        row: The row of the cell that was trained.
        runs: Its training; of ``resume``, ``reference`` and ``rounded`` those that there are.
    """
    cell, trace = Cell.parse(row.cell), Trace.of("", runs)
    run = trace.run()
    curves = _curves(run, "step")
    if "reference" in trace.runs:
        curves |= _named("reference_{}", _curves(trace.run("reference"), "reference"))
        allowed = dict(zip(_COMPARED, tolerances(cell, trace), strict=True))
        curves |= _named("{}_tolerance", {name: [_rounded(one) for one in allowed[name]] for name in _COMPARED})
    if "resume" in trace.runs:
        curves |= _named("resumed_{}", _curves(trace.run("resume"), "step", SAVED))
    peaks: dict[int, int] = {}
    for snapshot in run.snapshots:
        peaks[snapshot.rank] = max(peaks.get(snapshot.rank, 0), snapshot.memory)
    row.names, row.dtypes, row.steps = _names(cell, run), _dtypes(cell, run), curves
    row.mesh = mesh(cell, run)
    row.sent = sent_bytes(run)
    row.memory, row.tensor_bytes = [peaks[rank] for rank in sorted(peaks)], tensor_bytes(run)


#: What is compared with the reference, and drawn over it.
_COMPARED = ("loss", "grad_norm")


def _named(pattern: str, curves: Mapping[str, list[float | None]]) -> dict[str, list[float | None]]:
    return {pattern.format(name): curves[name] for name in _COMPARED if name in curves}


def _names(cell: Cell, run: RunTrace) -> list[dict[str, Any]]:
    """Return the unwrapped model's parameters, each with its live counterpart on rank 0 and the files that hold it.

    A live parameter or a key of a model's file that maps to no unwrapped name has a row of its own.
    """
    first, trained = run.first("build_model"), run.first("build")
    if first is None or first.unwrapped is None:
        return []
    unwrapped = {info.name: info for info in first.unwrapped.parameters}
    saved = {*unwrapped, *first.unwrapped.state_dict}
    strategy = STRATEGIES.get(cell.strategy)
    live = {}
    for info in trained.parameters if trained else ():
        live[strategy.canonical(info.name, cell, saved)] = info
    files = {file.path: file for snapshot in run.snapshots for file in snapshot.files if file.holds == "model"}
    keys = grouped((key, path) for path, file in files.items() for key in file.keys)
    rows = []
    for name in dict.fromkeys((*unwrapped, *live, *(key for key in keys if key not in saved))):
        one, other = unwrapped.get(name), live.get(name)
        row: dict[str, Any] = {"unwrapped": name if one else "", "shape": list(one.shape) if one else []}
        row |= {"loaded": one.dtype if one else "", "live": other.name if other else ""}
        row |= {"dtype": other.dtype if other else "", "kind": other.kind if other else ""}
        row |= {"placement": str(other.layout) if other else ""}
        row |= {"local": other.local_numel if other else 0, "held": other.held if other else None}
        row |= {"files": keys.get(name, [])} if one or other else {"live": "", "key": name, "files": keys[name]}
        rows.append(row)
    return rows[:MAX_NAMES]


def _dtypes(cell: Cell, run: RunTrace) -> list[dict[str, Any]]:
    """Return a row for each kind of tensor: the dtype that the strategy promises, and those of all ranks."""
    trained = run.trained
    if not trained:
        return []
    row = STRATEGIES.get(cell.strategy).dtypes(PRECISIONS.get(cell.precision))
    steps = [step for snapshot in trained for step in snapshot.steps]
    stored = [info for snapshot in trained for info in snapshot.parameters if info.trainable and info.local_numel]
    recorded: Mapping[str, Iterable[str]] = {
        "storage": [info.dtype for info in stored],
        "compute": [dtype for snapshot in trained for dtype in snapshot.compute],
        "reduce": [dtype for snapshot in trained for dtype in _reduced(snapshot)],
        **{
            name: [dtype for step in steps for dtype in getattr(step, name)] for name in ("gradient", "master", "state")
        },
    }
    found = [
        {"kind": name, "expected": getattr(row, name), "seen": sorted(set(dtypes))} for name, dtypes in recorded.items()
    ]
    return [one for one in found if one["seen"] or one["expected"]]


def _reduced(snapshot: Snapshot) -> Iterable[str]:
    """Return the dtype of the largest reduction: norms, metrics and flags are reduced too."""
    kinds: dict[str, int] = {}
    for info in snapshot.collectives:
        if info.op in REDUCTIONS and "float" in info.dtype:
            kinds[info.dtype] = max(kinds.get(info.dtype, 0), info.numel)
    return [max(kinds, key=lambda dtype: kinds[dtype])] if kinds else []


def _curves(run: RunTrace, action: str, before: int = 0) -> dict[str, list[float | None]]:
    """Return one number per step: the ranks' mean loss, rank 0's gradient norm, the slowest rank's seconds.

    ``before`` is the number of steps that another run took before; they have None.
    """
    curves: dict[str, list[float | None]] = {name: [None] * before for name in ("loss", "grad_norm", "seconds")}
    for nth in range(len({snapshot.index for snapshot in run.snapshots if snapshot.action == action})):
        snapshots = run.at(action, nth)
        losses = [snapshot.loss for snapshot in snapshots if snapshot.loss is not None]
        curves["loss"].append(_rounded(sum(losses) / len(losses)) if losses else None)
        norm = snapshots[0].grad_norm
        curves["grad_norm"].append(None if norm is None else _rounded(norm))
        curves["seconds"].append(_rounded(max(snapshot.seconds for snapshot in snapshots)))
    return {name: values for name, values in curves.items() if any(value is not None for value in values)}


def _rounded(value: float) -> float | None:
    """Round to six digits; return None for a number that JSON does not have."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
