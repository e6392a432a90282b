"""Probe of a model whose blocks were wrapped before the whole model was seen."""

from __future__ import annotations

import torch

from pytest_distcompat.probe.live import read_unwrapped
from pytest_distcompat.probe.parts import read_parts


def test_the_buffers_of_what_lies_above_the_blocks() -> None:
    """torchtitan's models have their rotary table on the root, and no file holds it."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    model.register_buffer("table", torch.ones(2), persistent=False)
    model.register_buffer("scale", torch.ones(2))
    buffers = read_parts(model, {id(model[0]): read_unwrapped(model[0])})
    assert {info.name: info.persistent for info in buffers.buffers} == {"table": False, "scale": True}
    assert set(buffers.state_dict) == set(model.state_dict())
    assert buffers.products == read_unwrapped(model).products == 1
