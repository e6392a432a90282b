"""A built-in driver that trains another model: its own ``blocks`` are what FSDP wraps one by one."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES, WrapSpec
from pytest_distcompat.world import World

WORLD = World(rank=0, local_rank=0, size=2, device="cpu")


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_trainer_gets_the_blocks(strategy: str) -> None:
    pytest.importorskip("transformers")
    from pytest_distcompat.drivers.trainer import TrainerDriver

    class Other(TrainerDriver):
        blocks = ("BertLayer", "BertPooler")

    driver = Other(Cell(strategy, "fp32", 2), WORLD)
    arguments = driver._backend_config()[0]
    assert arguments["fsdp_config"]["transformer_layer_cls_to_wrap"] == ["BertLayer", "BertPooler"]


@pytest.mark.parametrize("driver", ["accelerate:AccelerateDriver", "torch:TorchDriver"])
def test_blocks_are_recomputed_and_compiled(driver: str) -> None:
    torch = pytest.importorskip("torch")
    module_name, _, name = driver.partition(":")
    module = importlib.import_module(f"pytest_distcompat.drivers.{module_name}")
    base = getattr(module, name)

    class Block(torch.nn.Linear):  # type: ignore[misc,name-defined]  # of a module that is looked up
        pass

    other = type("Other", (base,), {"blocks": ("Block",)})
    block = Block(2, 2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), block)
    wrap = other(Cell("ddp", "fp32", 2), WORLD).wrap_spec
    assert wrap.block_modules(model) == [block]


def test_a_block_that_is_tied_to_a_module_outside_stays_with_it() -> None:
    torch = pytest.importorskip("torch")

    class Embeddings(torch.nn.Module):  # type: ignore[misc,name-defined]  # of a module that is looked up
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(4, 4)
            self.again = torch.nn.Linear(4, 4)

    class Layer(Embeddings):
        pass

    tied = Embeddings()
    own = Layer()
    # Within a block nothing else is concerned.
    own.again.weight = own.words.weight
    outside = torch.nn.Linear(4, 4)
    model = torch.nn.ModuleList([tied, own, outside])
    wrap = WrapSpec(("Embeddings", "Layer"))
    assert wrap.units(model) == [tied, own]
    outside.weight = tied.words.weight
    assert wrap.units(model) == [own]
    assert wrap.block_modules(model) == [tied, own]


def test_blocks_in_blocks_are_units_of_their_own() -> None:
    distributed = pytest.importorskip("torch.distributed")
    torch = pytest.importorskip("torch")
    from torch.distributed.fsdp import FSDPModule
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Inner(torch.nn.Linear):  # type: ignore[misc,name-defined]  # of a module that is looked up
        pass

    class Outer(torch.nn.Sequential):  # type: ignore[misc,name-defined]
        pass

    block = Outer(Inner(2, 2), torch.nn.Linear(2, 2))
    model = torch.nn.Sequential(block, torch.nn.Linear(2, 2))
    wrap = WrapSpec(("Inner", "Outer"))
    cell = Cell("fsdp2", "fp32", 2)
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        config: Any = STRATEGIES.get("fsdp2").torch
        config(model, PRECISIONS.get("fp32"), cell, torch.device("cpu"), wrap)
        are_units = [isinstance(module, FSDPModule) for module in model.modules()]
        assert are_units == [True, True, True, False, False]
    finally:
        distributed.destroy_process_group()
