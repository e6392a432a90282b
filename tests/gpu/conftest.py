"""Tests that need a GPU. Skipped, with the reason, where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.devices import visible_ids


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of the first GPU that there is."""
    found = visible_ids()
    if not found:
        pytest.skip("no GPU is visible (NVML, CUDA_VISIBLE_DEVICES)")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    # So that no test depends on how many there are.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", found[0])
    return found[0]


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
            "--distcompat-gpus=1",
            f"--distcompat-report={report}",
            *args,
        )
        assert report.exists(), result.stdout.str() + result.stderr.str()
        data = json.loads(report.read_text(encoding="utf-8"))
        assert data["session"]["device"] == "cuda"
        assert data["results"], result.stdout.str()
        return list(data["results"])

    return run
