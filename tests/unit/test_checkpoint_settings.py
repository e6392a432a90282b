"""The settings ``checkpoint.*``: arguments of ``torch.utils.checkpoint.checkpoint`` where a driver recomputes activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.upstream.drivers import _options


def cell(text: str = "") -> Cell:
    return Cell.of("ddp", "fp32", activation_checkpointing=True, set=text)


class Model(torch.nn.Module):
    """One that turns recomputation on by itself, as those of transformers do."""

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        self.given = gradient_checkpointing_kwargs


def test_a_model_is_given_what_the_cell_sets() -> None:
    model = Model()
    _options.recompute_by_model(model, [], cell())
    assert model.given == {"use_reentrant": False}
    _options.recompute_by_model(model, [], cell("checkpoint.use_reentrant=true"))
    assert model.given == {"use_reentrant": True}


@pytest.mark.parametrize(
    ("text", "reentrant"),
    [("", False), ("checkpoint.use_reentrant=true", True), ("checkpoint.early_stop=false", False)],
)
def test_a_wrapped_block_is_recomputed_as_the_cell_says(
    text: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils import checkpoint as module

    seen: list[Any] = []
    real = module.checkpoint

    def recorded(function: Any, *arguments: Any, **settings: Any) -> Any:
        seen.append(settings)
        return real(function, *arguments, **settings)

    monkeypatch.setattr("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.torch_utils_checkpoint", recorded)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    _options.recompute(model, [model[1]], cell(text))
    model(torch.ones(1, 2)).sum().backward()
    (settings,) = seen
    assert settings["use_reentrant"] is reentrant
    assert settings.get("early_stop", True) is ("early_stop" not in text)
