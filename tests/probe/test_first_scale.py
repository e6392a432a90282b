"""The loss scale that a compared training begins at: lowered if it is dynamic and large, else left alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pytest_distcompat.probe.snapshot import FIRST_SCALE, fit_first_scale, read_scaler


@pytest.mark.parametrize(("first", "then"), [(65536.0, FIRST_SCALE), (2.0**24, FIRST_SCALE), (8.0, 8.0)])
def test_a_gradient_scaler(first: float, then: float) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=7)
    fit_first_scale(scaler, None)
    assert read_scaler(scaler, None)["scale"] == then
    assert read_scaler(scaler, None)["growth_interval"] == 7
    # What scales the loss, not only what the state says.
    assert float(scaler.scale(torch.ones(()))) == then


def test_a_gradient_scaler_that_has_scaled() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    fit_first_scale(scaler, None)
    assert float(scaler.scale(torch.ones(()))) == FIRST_SCALE


def test_a_gradient_scaler_that_is_off() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    fit_first_scale(scaler, None)
    assert float(scaler.scale(torch.ones(()))) == 1.0


@pytest.mark.parametrize(("dynamic", "then"), [(True, FIRST_SCALE), (False, 65536.0)])
def test_deepspeeds_scale(dynamic: bool, then: float) -> None:
    zero = SimpleNamespace(loss_scale=65536.0, loss_scaler=SimpleNamespace(dynamic=dynamic))
    other = SimpleNamespace(loss_scale=65536.0, loss_scale_config=SimpleNamespace(dynamic_loss_scale=dynamic))
    for optimizer in (zero, other):
        fit_first_scale(None, optimizer)
        assert optimizer.loss_scale == then


def test_a_training_without_a_scale() -> None:
    fit_first_scale(None, None)
    fit_first_scale(None, torch.optim.SGD([torch.ones(1, requires_grad=True)]))
