"""What only a GPU can show. Skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest

from pytest_distcompat.devices import visible_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not visible_gpus(), reason="no GPU is visible (NVML, CUDA_VISIBLE_DEVICES)"),
]


def test_the_fork_server_stays_clean_of_cuda_and_ranks_use_nccl(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.distcompat(world_size=1)
        def test_reduce(process_group, device):
            import torch
            assert device.type == "cuda"
            assert torch.distributed.get_backend() == "nccl"
            total = torch.ones(4, device=device)
            torch.distributed.all_reduce(total)
            assert total.tolist() == [1.0] * 4
        """
    )
    result = pytester.runpytest_subprocess("--distcompat-gpus=1", "-W", "error::pytest.PytestWarning")
    result.assert_outcomes(passed=1)


def test_the_suite_runs_on_one_gpu(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(
        "--pyargs", "pytest_distcompat.suite", "--distcompat-gpus=1", "-k", "w1 and fsdp2"
    )
    assert result.parseoutcomes().get("failed", 0) == 0
    assert result.parseoutcomes()["passed"] > 0
