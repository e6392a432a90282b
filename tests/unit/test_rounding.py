"""Do the tolerances of single gradients leave room for what rounding alone moves in the built-in models?"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._reference import ROUNDING_FACTOR
from pytest_distcompat.checks.gradients import COMPARED, SMALLEST
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.models import MODELS, TinyModel
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.world import World

if TYPE_CHECKING:
    from torch.nn import Module


def is_trained_in_bfloat16(model: TinyModel) -> bool:
    """Tell whether a reference in float32 is compared with ranks in bfloat16, and this process can make the model."""
    in_bfloat16 = not model.only_float32 and not model.random
    return in_bfloat16 and not model.driver and not model.only_zero


TRAINED = [model.name for model in MODELS.by_name.values() if is_trained_in_bfloat16(model)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", TRAINED)
def test_rounding_alone_is_no_finding_of_gradients(name: str, ranks: int) -> None:
    torch = pytest.importorskip("torch")
    model = MODELS.get(name)
    cell = Cell.of("ddp", "fp32", model=name)
    module: Any = DRIVERS.get("torch")(cell, World(0, 1, 0, "cpu")).build_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    largest = 0.0
    for step in range(COMPARED):
        expected = norms_of(model, module, step, ranks)
        rounded = norms_of(model, copy.deepcopy(module).to(torch.bfloat16), step, ranks)
        smallest = SMALLEST * math.hypot(*expected.values())
        for parameter, norm in expected.items():
            deviation = abs(rounded[parameter] - norm) / max(norm, smallest)
            largest = max(largest, deviation)
        optimizer.step()
    measured = max(PRECISIONS.get("bf16_upcast").norm_tolerance, model.gradient_rounding)
    assert largest <= ROUNDING_FACTOR * measured


def norms_of(model: TinyModel, module: Module, step: int, ranks: int) -> dict[str, float]:
    """Take the backward pass of a step on the rows of so many ranks; return the norms by parameter."""
    module.zero_grad()
    for rank in range(ranks):
        loss = model.loss(module, model.batch(step, rank))
        (loss / ranks).backward()  # type: ignore[no-untyped-call]
    norms: dict[str, float] = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            norms[name] = parameter.grad.float().norm().item()
    return norms
