"""Tests that need a GPU. Skipped, with the reason, where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.devices import visible_ids
from pytest_distcompat.launch import nccl

#: One GPU and one rank on it. With an NCCL that shares GPUs the default is two.
ONE_RANK = ("--distcompat-gpus=1", "--distcompat-ranks-per-gpu=1")


@dataclass(frozen=True)
class SharedBackend:
    """What ranks that share a GPU talk through: as torch.distributed names it, and as the header of a session does."""

    name: str
    header: str


@pytest.fixture
def shared_backend() -> SharedBackend:
    """What ranks that share a GPU talk through."""
    return backend_of_shared_ranks()


def backend_of_shared_ranks() -> SharedBackend:
    """Return NCCL where the library that ranks load takes several ranks of one GPU, else gloo."""
    library = nccl.library()
    if library is not None and library.shares_gpus:
        return SharedBackend("nccl", str(library))
    return SharedBackend("gloo", "gloo")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of the first GPU that there is."""
    ids = visible_ids()
    if not ids:
        pytest.skip("no GPU is visible (NVML, CUDA_VISIBLE_DEVICES)")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    # So that no test depends on how many there are.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ids[0])
    return ids[0]


@pytest.fixture
def capability(gpu: str) -> tuple[int, int]:
    """Return the compute capability: 8.0 computes in bfloat16, 8.9 in 8 bits. https://developer.nvidia.com/cuda-gpus"""
    import pynvml

    pynvml.nvmlInit()
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByUUID(gpu))
    finally:
        pynvml.nvmlShutdown()
    return int(major), int(minor)


#: From a choice of items (``-k``) and further arguments to the results of the built-in suite.
RunSuite = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run_suite(pytester: pytest.Pytester) -> RunSuite:
    """Run a part of the built-in suite on the one GPU."""

    def run(chosen: str, *args: str) -> list[dict[str, Any]]:
        report = Path(pytester.path / "report.json")
        result = pytester.runpytest_subprocess(
            "--pyargs",
            "pytest_distcompat.suite",
            "-k",
            chosen,
            *ONE_RANK,
            f"--distcompat-report={report}",
            *args,
        )
        assert report.exists(), result.stdout.str() + result.stderr.str()
        data = json.loads(report.read_text(encoding="utf-8"))
        assert data["session"]["device"] == "cuda"
        assert data["results"], result.stdout.str()
        return list(data["results"])

    return run
