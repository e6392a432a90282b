"""The pool on the real inventory: what is leased is what CUDA shows, and what stays in use is seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_distcompat.lease import Pool, gpus

pytestmark = pytest.mark.gpu

#: Holds 512 MiB until its standard input ends.
HOLDER = """
import sys
import torch
held = torch.ones(512 << 20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


def start(environment: dict[str, str], *, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A process that holds memory on what that shows it."""
    holder = subprocess.Popen(
        [*prefix, sys.executable, "-c", HOLDER],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_freed_memory_is_no_leak(tmp_path: Path, gpu: str) -> None:
    with Pool(tmp_path / "leases", gpus(1)).lease(1, who="clean") as lease:
        assert lease.ids == (gpu,)
        start(dict(lease.environment)).communicate("", timeout=120)
    assert lease.leak == ()


def test_memory_still_in_use_is_a_leak(tmp_path: Path, gpu: str) -> None:
    pool = Pool(tmp_path / "leases", gpus(1), free_timeout=1.0)
    with pool.lease(1, who="leaky") as lease:
        holder = start(dict(lease.environment))
    try:
        ((name, size, who),) = [(leak.id, leak.bytes, leak.who) for leak in lease.leak]
        assert (name, who) == (gpu, "leaky")
        # The context is on top of what was allocated.
        assert 512 << 20 <= size <= 4 << 30
    finally:
        holder.communicate("", timeout=120)


@pytest.mark.parametrize("runs_share", [False, True], ids=["a notebook", "another run"])
def test_memory_of_a_neighbour_is_no_leak(runs_share: bool, tmp_path: Path, gpu: str) -> None:
    """It begins during the lease, and is no child of this process: a user's notebook."""
    pool = Pool(tmp_path / "leases", gpus(1, 2, runs_share=runs_share), free_timeout=1.0)
    with pool.lease(1, who="beside a notebook") as lease:
        holder = start({"CUDA_VISIBLE_DEVICES": gpu}, prefix=("setsid", "--fork"))
    try:
        assert lease.leak == ()
    finally:
        holder.communicate("", timeout=120)
