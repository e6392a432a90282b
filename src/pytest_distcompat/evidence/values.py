"""Values of a training in float32, to the last bit: what the same cell has to compute with the next release of a library."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import held_values
from pytest_distcompat.trace import FileInfo, RunTrace, Snapshot

#: The precision whose values are kept: others round so coarsely that a change of the stack shows anyway, or never.
PRECISION = "fp32"
#: The actions after which the values of all tensors are known, besides the first steps and the last one.
_HELD = ("build", "step", "export")


def values_of(cell: Cell, run: RunTrace) -> dict[str, Any]:
    """Return the values of a training; empty for one in another precision, and for one that no rank computed.

    - ``digests``: of parameters, buffers and each optimizer state, by action and kind (``step 2 exp_avg``), in their order. One
      digest is that of all tensors of a kind, by their names in the unwrapped model, however a strategy cuts them.
    - ``numbers``: a number for each step: ``loss``, ``grad_norm`` as the trainer reports it, ``gradients``, the sum of their
      squares, and ``lr``, the learning rates; ``outputs`` of the trained model on a fixed batch. They are exact, and None for
      what JSON does not have.
    - ``files``: the format of each saved file, what it holds, and a digest of its keys, shapes and dtypes.
    """
    if cell.precision != PRECISION or not run.has_values or run.unwrapped is None:
        return {}
    run = dataclasses.replace(run, cell=cell.id)
    found = {"digests": dict(_digests(run)), "numbers": _numbers(run), "files": _files(run)}
    return {name: values for name, values in found.items() if values}


def _digests(run: RunTrace) -> Iterator[tuple[str, str]]:
    """Yield the name of each group of tensors with its digest."""
    for action in _HELD:
        for number, index in enumerate(run.indices(action), 1):
            snapshots = run.at_index(index)
            if not snapshots[0].parameters:
                # Of most steps only numbers are recorded.
                continue
            name = action if action != "step" else f"step {number}"
            for kind, digests in sorted(held_values(run, snapshots).digests.items()):
                yield f"{name} {kind}", _hash(sorted(digests.items()))


def _numbers(run: RunTrace) -> dict[str, list[float | None]]:
    """Return the numbers of all steps, and those of the trained model."""
    steps = [run.at_index(index) for index in run.indices("step")]
    numbers = {
        "loss": [_sum([snapshot.loss for snapshot in snapshots]) for snapshots in steps],
        "grad_norm": [_sum([snapshots[0].grad_norm]) for snapshots in steps],
        "gradients": [_square_sum(snapshots) for snapshots in steps],
        "lr": [_learning_rate_sum(snapshots) for snapshots in steps],
    }
    evaluated = run.first("evaluate")
    if evaluated is not None:
        numbers["outputs"] = [_sum([output]) for output in evaluated.outputs]
    return {
        name: values
        for name, values in numbers.items()
        if any(value is not None for value in values)
    }


def _square_sum(snapshots: Sequence[Snapshot]) -> float | None:
    """Return the sum of the squares of all gradients that any rank's optimizer got in a step."""
    return _sum([step.square for snapshot in snapshots for step in snapshot.steps])


def _learning_rate_sum(snapshots: Sequence[Snapshot]) -> float | None:
    """Return the sum of the learning rates with which the optimizer of the first rank stepped."""
    groups = [group for step in snapshots[0].steps for group in step.param_groups]
    return _sum([group.get("lr") for group in groups])


def _sum(numbers: Sequence[float | None]) -> float | None:
    """Return the sum of the numbers in their order; None without any, or for a sum that JSON does not have."""
    known = [number for number in numbers if number is not None]
    total = math.fsum(known)
    if not known or not math.isfinite(total):
        return None
    return total


def _files(run: RunTrace) -> dict[str, str]:
    """Return what is known of each file that the training saved, by its path; the last that was read counts."""
    files: dict[str, str] = {}
    for snapshot in run.snapshots:
        for file in snapshot.files:
            files[file.path] = _format_of(file)
    return dict(sorted(files.items()))


def _format_of(file: FileInfo) -> str:
    """Return a file's format and what it holds, with a digest of its keys, shapes and dtypes."""
    content = [
        list(file.keys),
        sorted(file.shapes.items()),
        sorted(file.dtypes.items()),
        sorted(file.files.items()),
    ]
    return f"{file.format} {file.holds} {_hash(content)}".strip()


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
