"""Why cells with context or sequence parallelism are not run: the reasons, and that accelerate's ``cp_size`` cannot."""

from __future__ import annotations

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.ext.upstream.drivers._options import TORCH_CP
from pytest_distcompat.models import LLAMAS


@pytest.mark.parametrize("driver", ["accelerate", "trainer"])
def test_context_parallelism_is_that_of_ulysses(driver: str) -> None:
    reason = DRIVERS.get(driver).unsupported_reason
    assert reason(Cell.parse("fsdp2-fp32-w2-cp_2")) == TORCH_CP
    assert reason(Cell.parse("zero2-fp32-w2-cp_2")) is None


@pytest.mark.parametrize("model", ["llama_calibrated", "hf:gpt2", "mlp"])
@pytest.mark.parametrize(("driver", "strategy"), [("torch", "fsdp2"), ("deepspeed", "zero2")])
def test_the_models_of_context_parallelism_are_named(driver: str, strategy: str, model: str) -> None:
    """A model that is not driven may have a sequence all the same."""
    reason = DRIVERS.get(driver).unsupported_reason
    refused = reason(Cell.parse(f"{strategy}-fp32-w2-cp_2-model_{model}"))
    assert refused == "context parallelism is driven with the models llama, llama_tied, llama_dropout alone"
    for driven in LLAMAS:
        assert reason(Cell.parse(f"{strategy}-fp32-w2-cp_2-model_{driven}")) is None


def test_sequence_parallelism_needs_layers_in_the_plan() -> None:
    reason = DRIVERS.get("torch").unsupported_reason
    refused = reason(Cell.parse("fsdp2-fp32-w2-tp_2-sp-model_mlp"))
    assert refused == "the plan of the model mlp has no layers for sequence parallelism"
    assert reason(Cell.parse("fsdp2-fp32-w2-tp_2-sp-model_llama")) is None


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
