"""Devices that are lent to a test which starts its ranks itself, where these ranks share a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lease.conftest import RunOnGpus

CONFTEST = """
from pytest_distcompat.launch import nccl

pytest_plugins = ["pytest_distcompat.aliases"]
nccl.environment_of_shared_ranks = lambda: {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
"""

LENT = """
import os, pytest

@pytest.mark.require_distributed(2)
def test_one_each(): assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ

@pytest.mark.require_distributed(3)
def test_shared(): assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"

def test_after(): assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ
"""


def test_ranks_that_a_test_starts_may_share_a_gpu(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    """NCCL would refuse the third rank."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=LENT)
    run_on_gpus("--distcompat-gpus=2", "--distcompat-ranks-per-gpu=2").assert_outcomes(passed=3)
