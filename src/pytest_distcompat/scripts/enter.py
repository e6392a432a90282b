"""Start of the probe and the CPU bridge in every Python process of a launched script."""

from __future__ import annotations

import os

from pytest_distcompat.scripts import bridge, instrumentation
from pytest_distcompat.scripts.environment import ON_CPU, RUN
from pytest_distcompat.scripts.hosted_rank import claim


def enter() -> None:
    """Claim the rank if this process is one, and install the probe and the bridge."""
    if os.environ.get(RUN):
        if os.environ.get("RANK", "").isdecimal():
            claim(int(os.environ["RANK"]))
        instrumentation.install()
    if os.environ.get(ON_CPU) == "1":
        bridge.install()
