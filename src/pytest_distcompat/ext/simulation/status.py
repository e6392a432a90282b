"""The status of a check that passed in a simulation, which computes no values: ``simulated``.

It is weaker than ``passed``, and reports show it so. An entry point registers it with the core,
which does not know simulations; ``trace.StandIn`` names it in each snapshot of a simulated rank.
"""

from __future__ import annotations

from pytest_distcompat.status import Status

SIMULATED = Status(
    name="simulated",
    # In the matrix.
    word="simulated",
    style="known",
    # Any verdict of real ranks counts more.
    weight=Status.SKIPPED.weight,
    order=35,
    heading="weaker than ok",
    reason="simulated: no values were computed",
)
