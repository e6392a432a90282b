"""What the probe reads of state beside model and optimizer."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_distcompat.probe.extra import read_extra_state
from pytest_distcompat.probe.tensors import digest
from pytest_distcompat.trace import ExtraState


def values_of(value: Any) -> dict[str, str]:
    """Return what is read of one state."""
    (info,) = read_extra_state(SimpleNamespace(state=value), {"state": ExtraState()})
    return dict(info.values)


def test_numbers_with_a_fraction_are_apart() -> None:
    (info,) = read_extra_state(SimpleNamespace(state={"epoch": 2, "rate": 0.5, "on": True}), {"state": ExtraState()})
    assert info.exact == {"epoch": "2", "on": "True"}
    assert info.rounded == {"rate": "0.5"}


def test_a_collection_is_read_by_its_keys() -> None:
    assert values_of([{"a": (1, "two")}, {3}]) == {"0.a.0": "1", "0.a.1": "'two'", "1.0": "'3'"}


def test_a_tensor_and_a_module_are_digested() -> None:
    tensor = torch.arange(3.0)
    assert values_of(tensor) == {"": digest(tensor)}
    module = torch.nn.BatchNorm1d(2)
    names = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert values_of(module).keys() == names


@pytest.mark.parametrize("make", [lambda seed: torch.Generator().manual_seed(seed), random.Random])
def test_random_states(make: Any) -> None:
    assert values_of(make(1)) == values_of(make(1)) != values_of(make(2))


def test_an_object_has_a_state_dict() -> None:
    assert values_of(SimpleNamespace(state_dict=lambda: {"seen": 7})) == {"state_dict.seen": "7"}


def test_a_name_may_have_dots() -> None:
    driver = SimpleNamespace(trainer=SimpleNamespace(seen=1))
    (info,) = read_extra_state(driver, {"trainer.seen": ExtraState()})
    assert info.name == "trainer.seen"
    assert info.exact == {"": "1"}


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (SimpleNamespace(), "extra_state names 'state', and SimpleNamespace has no attribute 'state'"),
        (
            SimpleNamespace(state=object()),
            r"extra_state 'state' has a object: .*; expected a tensor, a module, a number",
        ),
    ],
)
def test_what_cannot_be_read_is_an_error(driver: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        read_extra_state(driver, {"state": ExtraState()})


def test_a_tensor_that_the_reference_has_too_has_a_square() -> None:
    driver = SimpleNamespace(state={"weight": torch.full((3,), 2.0), "steps": torch.tensor(7), "rate": 0.5})
    (info,) = read_extra_state(driver, {"state": ExtraState(in_reference=True)})
    assert info.squares == {"weight": 12.0}
    (info,) = read_extra_state(driver, {"state": ExtraState()})
    assert info.squares == {}


@pytest.mark.parametrize("in_reference", [False, True])
def test_a_tensor_without_values_is_read(in_reference: bool) -> None:
    """One process that stands in for the ranks has tensors of shapes alone."""
    driver = SimpleNamespace(state=torch.zeros(3, device="meta"))
    (info,) = read_extra_state(driver, {"state": ExtraState(in_reference=in_reference)})
    assert list(info.rounded) == [""]
