"""The built-in suite on a real GPU, in every precision that it has kernels for."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.gpu.conftest import RunSuite

pytestmark = pytest.mark.gpu

#: From which compute capability on there are kernels.
NEEDS = {"fp32": (0, 0), "fp16_mixed": (7, 0), "bf16_upcast": (8, 0), "bf16_pure": (8, 0), "fp8": (8, 9)}


def require(package: str) -> None:
    """Skip without the package. pytester restores sys.modules, and torch cannot be imported a second time."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def bad(results: list[dict[str, Any]]) -> dict[str, str]:
    """Return the items that neither passed nor are known, with their messages."""
    good = {"passed", "known", "refused", "skipped"}
    return {
        f"{result['driver']}: {result['cell']}: {result['check']}: {result['status']}": result["message"]
        for result in results
        if result["status"] not in good
    }


@pytest.mark.parametrize("precision", NEEDS)
@pytest.mark.parametrize("driver", ["torch", "accelerate"])
def test_fsdp2_on_one_gpu(driver: str, precision: str, run_suite: RunSuite, capability: tuple[int, int]) -> None:
    if capability < NEEDS[precision]:
        pytest.skip(f"a GPU of compute capability {capability} has no kernels for {precision}")
    require(driver)
    if precision == "fp8":
        require("torchao")
    results = run_suite(f"fsdp2-{precision}-w1:", f"--distcompat-drivers={driver}")
    assert not bad(results)
    status = {result["check"]: result["status"] for result in results}
    # Whatever else is known to be wrong, it trained, sharded by FSDP2, and came back from its checkpoint.
    assert (status["active"], status["optimizer"]) == ("passed", "passed")
    # accelerate steps the scaler when it loads FSDP2's optimizer (https://github.com/huggingface/accelerate/issues/4289).
    known = (driver, precision) == ("accelerate", "fp16_mixed")
    assert status["resume"] == ("known" if known else "passed")


def test_zero_on_one_gpu(run_suite: RunSuite, capability: tuple[int, int]) -> None:
    if capability < NEEDS["bf16_upcast"]:
        pytest.skip(f"a GPU of compute capability {capability} has no kernels for bf16_upcast")
    require("deepspeed")
    results = run_suite("zero2-bf16_upcast-w1:", "--distcompat-drivers=deepspeed")
    assert not bad(results)


def test_two_ranks_that_share_the_gpu(run_suite: RunSuite) -> None:
    """DDP, for that needs no more than gloo has for tensors of a GPU. Four ranks: a checkpoint goes on at twice the size."""
    shared = ("--distcompat-ranks-per-gpu=4", "--distcompat-world-size=2", "--distcompat-drivers=torch")
    results = run_suite("ddp-fp32-w2:", *shared)
    assert not bad(results)
    assert {result["check"]: result["status"] for result in results}["active"] == "passed"
