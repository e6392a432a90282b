"""Part of the checks ``restarts`` and ``again``: are repeated steps those of the first time?

A trainer that loads a checkpoint repeats the steps that followed the save. Its losses and the
numbers of its optimizer's param groups (``lr``, ``weight_decay``) must be those of the first time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytest_distcompat.checks._base import Snapshots, pairs, with_rank
from pytest_distcompat.checks.resume import LOSS_TOLERANCE, RATE_TOLERANCE
from pytest_distcompat.model_values import unlike
from pytest_distcompat.trace import Snapshot


def first_other_step(
    first_time: Sequence[Snapshots], repeated: Sequence[Snapshots], load: str, before: str
) -> Iterator[str]:
    """Yield findings for the first repeated step that is another than the first time.

    Args:
        first_time: The snapshots of all ranks after each of the steps that followed the save.
        repeated: The same after each step that followed the load.
        load: The words for the load: ``after the second load``.
        before: The words for the first time: ``in the run that never stopped``.
    """
    for nth, expected_snapshots in enumerate(first_time):
        step = f"{nth + 1} {load}"
        wrong: list[str] = []
        for expected, snapshot in pairs(expected_snapshots, repeated[nth]):
            wrong += with_rank(snapshot, _other_step(expected, snapshot, step, before))
        yield from wrong
        if wrong:
            # Later steps differ because of this one.
            return


def _other_step(expected: Snapshot, snapshot: Snapshot, step: str, before: str) -> Iterator[str]:
    """Yield texts about the loss and the numbers of param groups in a rank's step."""
    if expected.loss is None or snapshot.loss is None:
        yield f"no loss to compare in step {step}; expected step() to return it"
    elif not math.isclose(expected.loss, snapshot.loss, rel_tol=LOSS_TOLERANCE):
        yield f"loss {step} is {snapshot.loss:.6g}; {expected.loss:.6g} {before}"
    for number in unlike(expected.param_groups, snapshot.param_groups, RATE_TOLERANCE):
        # Only numbers that both have can be compared.
        if number.before is None or number.after is None:
            continue
        setting = f"{number.key} of the optimizer's group {number.group}"
        yield f"{setting} is {number.after:.6g} in step {step}; {number.before:.6g} {before}"
