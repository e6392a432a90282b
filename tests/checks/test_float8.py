"""Check ``float8`` on hand-made traces: layers that are not converted, products not in 8 bits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers.torch import TorchDriver

if TYPE_CHECKING:
    from tests.checks.traces import Sound, Story

CELLS = ("ddp-fp8-w2", "zero2-fp8-w2", "fsdp2-fp8-w2-fp8_backend_te")
#: Of a model with five linear layers; the recipe leaves out the first and the last.
LINEARS = 5
CONVERTED = 3


def converted(story: Story, layers: int = CONVERTED, casts: int = 2 * CONVERTED) -> Story:
    """The story of a model of which so many layers are in 8 bits."""
    unwrapped = story.trace.run().at("build_model")[0].unwrapped
    assert unwrapped is not None
    story = story.snapshot("build_model", {"unwrapped": replace(unwrapped, linears=LINEARS)})
    for action in ("build", "step"):
        story = story.model({"float8": layers}, action=action)
    return story.snapshot("step", {"float8": casts})


@pytest.mark.parametrize("cell", CELLS)
def test_all_but_the_first_and_the_last_are_enough(sound: Sound, cell: str) -> None:
    assert converted(sound(cell)).findings("float8") == []
    story = converted(sound(cell), LINEARS, 3 * LINEARS)
    assert story.findings("float8") == []


@pytest.mark.parametrize("layers", [0, CONVERTED - 1])
@pytest.mark.parametrize("cell", CELLS)
def test_layers_that_are_not_converted(sound: Sound, cell: str, layers: int) -> None:
    story = converted(sound(cell)).model({"float8": layers}, action="build", rank=1)
    assert story.findings("float8") == [
        f"rank 1: {layers} of 5 linear layers are in 8 bits after build; expected all but the first and the last"
    ]


def test_layers_that_do_not_stay_converted(sound: Sound) -> None:
    story = converted(sound("ddp-fp8-w2")).model({"float8": 0}, action="step", nth=2, rank=0)
    assert story.findings("float8") == [
        "rank 0: 0 of 5 linear layers are in 8 bits after three steps; expected all but the first and the last"
    ]


def test_products_in_more_bits(sound: Sound) -> None:
    story = converted(sound("zero2-fp8-w2")).snapshot("step", {"float8": 5}, nth=2, rank=1)
    assert story.findings("float8") == [
        "rank 1: 5 tensors were made in 8 bits in a step of 3 such layers; expected two factors of each product at least"
    ]


@pytest.mark.parametrize("cell", ["ddp-fp8-w2-fp8_backend_te", "ddp-fp8-w2-compile"])
def test_no_8_bit_product_is_required_where_none_is_recorded(sound: Sound, cell: str) -> None:
    story = converted(sound(cell), casts=0)
    assert story.findings("float8") == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_a_loss_that_is_no_number(sound: Sound, loss: float | None) -> None:
    story = converted(sound("ddp-fp8-w2")).snapshot("step", {"loss": loss}, nth=2, rank=0)
    assert story.findings("float8") == [f"rank 0: the loss is {loss}; expected a number"]


def test_nothing_to_convert(sound: Sound) -> None:
    story = converted(sound("ddp-fp8-w2"))
    unwrapped = story.trace.run().at("build_model")[0].unwrapped
    assert unwrapped is not None
    changed = story.snapshot("build_model", {"unwrapped": replace(unwrapped, linears=0)})
    assert changed.findings("float8") == [
        "the unwrapped model has no linear layer whose sizes 16 divides: there is nothing to convert"
    ]


def test_a_silent_rank(sound: Sound) -> None:
    story = converted(sound("ddp-fp8-w2")).without("step", nth=2, rank=1)
    assert story.findings("float8") == ["rank 1: no report after three steps"]


def test_other_precisions_require_no_8_bit_layers(sound: Sound) -> None:
    check = CHECKS.get("float8")
    assert check.not_applicable(sound("ddp-fp32-w2").cell, TorchDriver) == "fp32 has no 8-bit layers"
    assert not check.not_applicable(sound("ddp-fp8-w2").cell, TorchDriver)
