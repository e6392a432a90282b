"""The evidence of one cell's training: names, dtypes, curves, memory, mesh and values.

A cell is one point of the test matrix, such as ``fsdp2-bf16_upcast-w2``. Its training is the run
``train`` (one process group from start to end), of which each rank recorded a *snapshot* after each
action: ``build``, ``step``, ``files``, ...

``evidence.store`` calls ``add_training`` for each cell of a session's report, and so does the
command ``distcompat trace`` for one cell. It fills the fields of ``report.result.Row`` with plain
data, which goes to JSON and to the HTML page as it is. The schema of the report describes the keys.
A parameter is a row of the table ``names``, for example:

    {"unwrapped": "lm_head.weight", "live": "module.lm_head.weight", "dtype": "float32", ...}

The *unwrapped* model is the one before anything wraps it. *Live* names are those of the wrapped
model; ``strategy.canonical`` returns the unwrapped name for a live one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import REDUCTIONS, tolerances
from pytest_distcompat.cost import tensor_bytes
from pytest_distcompat.evidence.meshes import mesh
from pytest_distcompat.evidence.values import values_of
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.report.result import ADDED_EVIDENCE, Row
from pytest_distcompat.scenario import SAVED
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ParameterInfo, RunTrace, Snapshot, Trace

#: The most rows that the table of names has.
MAX_NAMES = 400

#: The curves that are shown beside those of the reference and of the resumed run.
_COMPARED = ("loss", "grad_norm")
#: A number for each step. None for a step without one, and for infinity and NaN, which JSON lacks.
_Curve = list[float | None]
#: Name of a curve (``loss``, ``reference_loss``, ``seconds``) -> the curve.
_Curves = dict[str, _Curve]
#: A row of a table of the report: column -> value.
_TableRow = dict[str, Any]


def add_training(row: Row, *runs: RunTrace) -> None:
    """Add the evidence of a training to the row of its cell.

    A run that failed has the evidence of the steps that it took.

    Args:
        row: The row of the cell that was trained.
        runs: The run ``train``, and any of the runs ``resume`` (which goes on from its checkpoint),
            ``reference`` (one process in float32) and ``rounded`` (the same under autocast).
    """
    cell = Cell.parse(row.cell)
    trace = Trace.of("", runs)
    run = trace.run()
    row.names = _names(cell, run)
    row.dtypes = _dtypes(cell, run)
    row.steps = _all_curves(cell, trace)
    row.mesh = mesh(cell, run)
    row.memory = _peak_memory(run)
    row.tensor_bytes = tensor_bytes(run)
    row.values = values_of(cell, run)
    # Extensions fill in further fields.
    for added in ADDED_EVIDENCE.by_name.values():
        added.add(row, run)


def _all_curves(cell: Cell, trace: Trace) -> _Curves:
    """Return the curves of the training, with those of the reference and of the resumed run.

    They are ``loss``, ``grad_norm`` and ``seconds`` of the training, ``reference_loss`` and
    ``resumed_loss``, ``loss_tolerance`` and so on. Curves of a run that is not there are left out.
    """
    curves = _curves(trace.run(), "step")
    if "reference" in trace.runs:
        reference = _curves(trace.run("reference"), "reference")
        _add_compared(curves, reference, "reference")
        # One for each step, relative to the reference's number.
        loss_tolerances, norm_tolerances = tolerances(cell, trace)
        curves["loss_tolerance"] = [_rounded(tolerance) for tolerance in loss_tolerances]
        curves["grad_norm_tolerance"] = [_rounded(tolerance) for tolerance in norm_tolerances]
    if "resume" in trace.runs:
        resumed = _curves(trace.run("resume"), "step", SAVED)
        _add_compared(curves, resumed, "resumed")
    return curves


def _add_compared(curves: _Curves, others: _Curves, prefix: str) -> None:
    """Add the loss and norm of another run, under names with a prefix: ``reference_loss``."""
    for name in _COMPARED:
        if name in others:
            curves[f"{prefix}_{name}"] = others[name]


def _peak_memory(run: RunTrace) -> list[int]:
    """Return the peak memory of each rank in bytes, in rank order."""
    peaks: dict[int, int] = {}
    for snapshot in run.snapshots:
        peak = peaks.get(snapshot.rank, 0)
        peaks[snapshot.rank] = max(peak, snapshot.memory)
    return [peaks[rank] for rank in sorted(peaks)]


def _names(cell: Cell, run: RunTrace) -> list[_TableRow]:
    """Return a row for each parameter: its unwrapped name, its live counterpart, and its files.

    A live parameter, or a key of a saved file, that is no name of the unwrapped model has a row of
    its own.
    """
    first = run.first("build_model")
    if first is None or first.unwrapped is None:
        return []
    unwrapped = {info.name: info for info in first.unwrapped.parameters}
    unwrapped_keys = {*unwrapped, *first.unwrapped.state_dict}
    live = _live_parameters(cell, run, unwrapped_keys)
    files_by_key = _files_by_key(run)
    # A dict, because it keeps the order and has each name only once.
    names: dict[str, None] = dict.fromkeys((*unwrapped, *live))
    for key in files_by_key:
        if key not in unwrapped_keys:
            names[key] = None
    rows = []
    for name in list(names)[:MAX_NAMES]:
        row = _name_row(name, unwrapped.get(name), live.get(name))
        row["files"] = files_by_key.get(name, [])
        rows.append(row)
    return rows


def _live_parameters(
    cell: Cell, run: RunTrace, unwrapped_keys: set[str]
) -> dict[str, ParameterInfo]:
    """Return unwrapped name -> live parameter, on the lowest rank after the build."""
    trained = run.first("build")
    if trained is None:
        return {}
    strategy = STRATEGIES.get(cell.strategy)
    parameters: dict[str, ParameterInfo] = {}
    for info in trained.parameters:
        name = strategy.canonical(info.name, cell, unwrapped_keys)
        parameters[name] = info
    return parameters


def _files_by_key(run: RunTrace) -> dict[str, list[str]]:
    """Return key -> the paths of the saved model files that have it."""
    keys_by_path: dict[str, Iterable[str]] = {}
    for snapshot in run.snapshots:
        for file in snapshot.files:
            if file.holds == "model":
                keys_by_path[file.path] = file.keys
    paths_by_key: dict[str, list[str]] = {}
    for path, keys in keys_by_path.items():
        for key in keys:
            paths_by_key.setdefault(key, []).append(path)
    return paths_by_key


def _name_row(
    name: str,
    unwrapped: ParameterInfo | None,
    live: ParameterInfo | None,
) -> _TableRow:
    """Return a row of the table of names, without the column ``files``.

    Args:
        name: The unwrapped name, or a key that is none.
        unwrapped: The parameter of the unwrapped model; None if it has none of that name.
        live: The live parameter; None if there is none.
    """
    row: _TableRow = {
        # Of the unwrapped model: its name there, its shape, and the dtype that it was loaded in.
        "unwrapped": "",
        "shape": [],
        "loaded": "",
        # Of the wrapped model: its name there, its dtype, its kind (``DTensor``), how it is placed
        # on the mesh (``dp_shard=Shard(0)``), and how many elements the lowest rank holds.
        "live": "",
        "dtype": "",
        "kind": "",
        "placement": "",
        "local": 0,
        # How often the optimizer's param groups have this tensor; None under ZeRO, whose optimizer
        # has flat copies.
        "held": None,
    }
    if unwrapped:
        row["unwrapped"] = name
        row["shape"] = list(unwrapped.shape)
        row["loaded"] = unwrapped.dtype
    if live:
        row["live"] = live.name
        row["dtype"] = live.dtype
        row["kind"] = live.kind
        row["placement"] = str(live.layout)
        row["local"] = live.local_numel
        row["held"] = live.held
    # A key of a file that is no parameter's name.
    if not unwrapped and not live:
        row["key"] = name
    return row


def _dtypes(cell: Cell, run: RunTrace) -> list[_TableRow]:
    """Return a row for each kind of tensor: the expected dtype, and those that ranks had.

    ``{"kind": "master", "expected": "float32", "seen": ["float32"]}``. The kinds are ``storage``
    (live parameters), ``compute`` (matrix products), ``reduce`` (gradients in collectives),
    ``gradient`` (as the optimizer sees them), ``master`` (what it updates) and ``state``.
    """
    if not run.trained:
        return []
    strategy = STRATEGIES.get(cell.strategy)
    promised = strategy.dtypes(PRECISIONS.get(cell.precision))
    rows = []
    for kind, seen in _seen_dtypes(run.trained).items():
        expected = getattr(promised, kind)
        if seen or expected:
            rows.append({"kind": kind, "expected": expected, "seen": sorted(seen)})
    return rows


def _seen_dtypes(snapshots: Sequence[Snapshot]) -> dict[str, set[str]]:
    """Return kind of tensor -> the dtypes that any rank recorded for it."""
    seen: dict[str, set[str]] = {}
    for kind in ("storage", "compute", "reduce", "gradient", "master", "state"):
        seen[kind] = set()
    for snapshot in snapshots:
        for info in snapshot.parameters:
            if info.trainable and info.local_numel:
                seen["storage"].add(info.dtype)
        seen["compute"].update(snapshot.compute)
        seen["reduce"].update(_reduced(snapshot))
        for step in snapshot.steps:
            seen["gradient"].update(step.gradient)
            seen["master"].update(step.master)
            seen["state"].update(step.state)
    return seen


def _reduced(snapshot: Snapshot) -> Iterable[str]:
    """Return the dtype of the largest reduction of a step, in a list; none without a reduction.

    It is that of gradients. Smaller reductions are of norms, metrics and flags.
    """
    # Dtype -> the most elements of a reduction in it.
    largest_numel: dict[str, int] = {}
    for info in snapshot.collectives:
        if info.op in REDUCTIONS and "float" in info.dtype:
            largest = largest_numel.get(info.dtype, 0)
            largest_numel[info.dtype] = max(largest, info.numel)
    if not largest_numel:
        return []
    return [max(largest_numel, key=lambda dtype: largest_numel[dtype])]


def _curves(run: RunTrace, action: str, before: int = 0) -> _Curves:
    """Return the curves of a run: the ranks' mean loss, the norm, and the slowest rank's seconds.

    Args:
        run: The run.
        action: The action that is a step of this run: ``step`` or ``reference``.
        before: How many steps came before its first one. The curves have None for them, so that
            those of a resumed run begin at the right step.
    """
    losses: _Curve = [None] * before
    norms: _Curve = [None] * before
    seconds: _Curve = [None] * before
    indices: set[int] = set()
    for snapshot in run.snapshots:
        if snapshot.action == action:
            indices.add(snapshot.index)
    for nth in range(len(indices)):
        snapshots = run.at(action, nth)
        losses.append(_mean_loss(snapshots))
        norms.append(_rounded(snapshots[0].grad_norm))
        slowest = max(snapshot.seconds for snapshot in snapshots)
        seconds.append(_rounded(slowest))
    curves = {"loss": losses, "grad_norm": norms, "seconds": seconds}
    return {name: curve for name, curve in curves.items() if _has_numbers(curve)}


def _mean_loss(snapshots: Iterable[Snapshot]) -> float | None:
    """Return the mean of the losses that the ranks report; None if no rank reports one."""
    losses: list[float] = []
    for snapshot in snapshots:
        if snapshot.loss is not None:
            losses.append(snapshot.loss)
    if not losses:
        return None
    return _rounded(sum(losses) / len(losses))


def _has_numbers(curve: _Curve) -> bool:
    return any(value is not None for value in curve)


def _rounded(value: float | None) -> float | None:
    """Return the number with six digits; None for None, infinity and NaN, which JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")
