"""The status of a claim that holds in a simulation, which computes no values.

It is weaker than ``passed``.
"""

from __future__ import annotations

from pytest_distcompat.status import Status

SIMULATED = Status(
    "simulated",
    "simulated",
    "known",
    Status.SKIPPED.weight,
    order=35,
    heading="weaker than ok",
    reason="simulated: no values were computed",
)
