"""All values of a training in float32, to the last bit, to compare it with other releases.

``evidence.cells`` calls ``values_of`` for the training of each cell in ``fp32``. The report stores
the result. ``distcompat`` commands that compare two reports, or run a suite with other releases of
a library, show what a release has changed although all checks pass.

The data are small: digests (hashes of 12 hexadecimal digits) in place of tensors, and one number a
step, for example ``{"digests": {"step 3 parameter": "0a1b..."}, "numbers": {"loss": [0.69, ...]},
"files": {"model.safetensors": "safetensors model 9f3c..."}}``.
"""

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

#: A number for each step. None for a step without one, and for infinity and NaN.
_Numbers = list[float | None]

#: The only precision whose values are compared. Others round so coarsely that a change of a library
#: shows anyway, or never.
PRECISION = "fp32"
#: The actions after which the values of all tensors may be recorded: after ``step`` only for some
#: steps.
_HELD = ("build", "step", "export")


def values_of(cell: Cell, run: RunTrace) -> dict[str, Any]:
    """Return the values of a training; empty in another precision, or if tensors have no values.

    - ``digests`` has a digest of all parameters, of all buffers, and of each kind of optimizer
      state, by action and kind (``step 2 exp_avg``). They do not depend on how a strategy shards
      the tensors.
    - ``numbers`` has lists with a number for each step: ``loss``, ``grad_norm`` as the trainer
      reports it, ``gradients`` (the sum of their squares) and ``lr`` (the sum of the learning
      rates). ``outputs`` are those of the trained model on a fixed batch. Infinity and NaN, which
      JSON lacks, are None.
    - ``files`` has for each saved file its format, what it holds, and a digest of its keys, shapes
      and dtypes.
    """
    if cell.precision != PRECISION:
        return {}
    if not run.has_values or run.unwrapped is None:
        return {}
    # ``held_values`` maps names of the wrapped model to unwrapped ones by the cell of the run.
    run = dataclasses.replace(run, cell=cell.id)
    groups = {
        "digests": dict(_digests(run)),
        "numbers": _numbers(run),
        "files": _files(run),
    }
    return {name: values for name, values in groups.items() if values}


def _digests(run: RunTrace) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of each group of tensors: ``("step 2 exp_avg", "0a1b...")``."""
    for action in _HELD:
        for number, index in enumerate(run.indices(action), 1):
            snapshots = run.at_index(index)
            if not snapshots[0].parameters:
                # After most steps no tensors are recorded, only numbers.
                continue
            name = action
            if action == "step":
                name = f"step {number}"
            digests_by_kind = held_values(run, snapshots).digests
            for kind, digests in sorted(digests_by_kind.items()):
                digest = _hash(sorted(digests.items()))
                yield f"{name} {kind}", digest


def _numbers(run: RunTrace) -> dict[str, _Numbers]:
    """Return the numbers of each step, and the outputs of the trained model.

    A list in which all are None is left out.
    """
    numbers: dict[str, _Numbers] = {
        "loss": [],
        "grad_norm": [],
        "gradients": [],
        "lr": [],
    }
    for index in run.indices("step"):
        snapshots = run.at_index(index)
        losses = [snapshot.loss for snapshot in snapshots]
        first_norm = snapshots[0].grad_norm
        numbers["loss"].append(_sum(losses))
        numbers["grad_norm"].append(_sum([first_norm]))
        numbers["gradients"].append(_square_sum(snapshots))
        numbers["lr"].append(_learning_rate_sum(snapshots))
    evaluated = run.first("evaluate")
    if evaluated is not None:
        numbers["outputs"] = [_sum([output]) for output in evaluated.outputs]
    return {name: values for name, values in numbers.items() if _has_numbers(values)}


def _has_numbers(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)


def _square_sum(snapshots: Sequence[Snapshot]) -> float | None:
    """Return the sum, over all ranks, of the squares of the gradients that the optimizer got."""
    squares: _Numbers = []
    for snapshot in snapshots:
        squares += [step.square for step in snapshot.steps]
    return _sum(squares)


def _learning_rate_sum(snapshots: Sequence[Snapshot]) -> float | None:
    """Return the sum of the learning rates with which the optimizer of the first rank stepped."""
    rates: _Numbers = []
    for step in snapshots[0].steps:
        rates += [group.get("lr") for group in step.param_groups]
    return _sum(rates)


def _sum(numbers: Sequence[float | None]) -> float | None:
    """Return the sum of the numbers that are not None; None if it is infinite or NaN.

    It is also None if there is no number.
    """
    known = [number for number in numbers if number is not None]
    total = math.fsum(known)
    if not known or not math.isfinite(total):
        return None
    return total


def _files(run: RunTrace) -> dict[str, str]:
    """Return path of a saved file -> its description, as the file was when it was last read."""
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
    digest = _hash(content)
    text = f"{file.format} {file.holds} {digest}"
    return text.strip()


def _hash(content: Any) -> str:
    """Return 12 hexadecimal digits of the hash of JSON data."""
    data = json.dumps(content).encode()
    return hashlib.sha256(data).hexdigest()[:12]
