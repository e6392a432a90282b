"""That accelerate's ``cp_size`` cannot run on the CPU, as its cells without ranks say."""

from __future__ import annotations

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.ext.upstream.drivers._options import TORCH_CP


@pytest.mark.parametrize("driver", ["accelerate", "trainer"])
def test_context_parallelism_is_that_of_ulysses(driver: str) -> None:
    reason = DRIVERS.get(driver).unsupported_reason
    assert reason(Cell.parse("fsdp2-fp32-w2-cp_2")) == TORCH_CP
    assert reason(Cell.parse("zero2-fp32-w2-cp_2")) is None


def test_trainer_gathers_losses_of_all_ranks_alone_on_the_cpu() -> None:
    cell = Cell.parse("zero2-fp32-w4-cp_2")
    reason = DRIVERS.get("trainer").unsupported_reason
    assert "'Global rank 0 is not part of group'" in str(reason(cell))
    assert reason(cell, "cuda") is None
    assert DRIVERS.get("accelerate").unsupported_reason(cell) is None


@pytest.mark.nightly
def test_torch_has_no_kernel_for_it_on_the_cpu() -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn import functional
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        heads, weight = torch.ones(1, 2, 8, 4), torch.ones(1, requires_grad=True)
        parts = context_parallel(init_device_mesh("cpu", (2,)), buffers=[heads], buffer_seq_dims=[2])
        with parts:
            part = heads * weight
            with pytest.raises(NotImplementedError, match="does not have a sharding strategy registered"):
                functional.scaled_dot_product_attention(part, part, part, is_causal=True)
    finally:
        torch.distributed.destroy_process_group()
