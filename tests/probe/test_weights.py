"""Weights of tokens, read from the gradient of logits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

from pytest_distcompat.probe.observe import Observer
from pytest_distcompat.probe.weights import logits_of, read_weights
from pytest_distcompat.trace import TokenWeights

#: Two rows of five tokens, seven classes; the first row has three labels, the second all.
LABELS = torch.tensor(
    [
        [0, 3, 6, -100, -100],
        [1, 2, 3, 4, 5],
    ]
)


def weights_of(loss: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32) -> TokenWeights:
    """Return what is read of a loss of logits."""
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=dtype, requires_grad=True)
    loss(logits).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    return read_weights(logits, logits.grad)


def read(weights: TokenWeights) -> list[tuple[int, float]]:
    """Return the tokens and the weight of each row."""
    assert weights.known
    return [(row.tokens, round(row.weight, 3)) for row in weights.rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_over_tokens(dtype: torch.dtype) -> None:
    def loss(logits: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits.float().flatten(0, 1), LABELS.flatten())

    first, second = weights_of(loss, dtype).rows
    assert first.tokens == 3
    assert second.tokens == 5
    assert first.weight == pytest.approx(1 / 8, rel=0.01)
    assert second.weight == pytest.approx(1 / 8, rel=0.01)


def loss_of_second_row(logits: torch.Tensor, **how: Any) -> torch.Tensor:
    """Return the loss of the row in which all tokens have labels."""
    return cross_entropy(logits[1], LABELS[1], **how)


def test_the_mean_of_rows() -> None:
    def loss(logits: torch.Tensor) -> torch.Tensor:
        loss_of_first_row = cross_entropy(logits[0], LABELS[0])
        return (loss_of_first_row + loss_of_second_row(logits)) / 2

    assert read(weights_of(loss)) == [(3, 0.167), (5, 0.1)]


def test_a_row_without_labels() -> None:
    weights = weights_of(lambda logits: loss_of_second_row(logits, reduction="sum"))
    assert read(weights) == [(5, 1.0)]


#: Another weight for each token of a row.
UNEQUAL = torch.arange(1.0, 6.0)


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits: mse_loss(logits, torch.zeros_like(logits)),
        lambda logits: loss_of_second_row(logits, label_smoothing=0.1),
        lambda logits: (loss_of_second_row(logits, reduction="none") * UNEQUAL).sum(),
        lambda logits: logits.sum() * float("inf"),
    ],
)
def test_of_another_loss_nothing_is_known(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert not weights_of(loss).known


def test_where_the_logits_are() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    assert logits_of(logits) is logits
    assert logits_of(SimpleNamespace(logits=logits)) is logits
    without_gradient = logits.detach()
    without_rows = torch.zeros(3, requires_grad=True)
    of_a_single_class = torch.zeros(2, 1, requires_grad=True)
    for output in (None, without_gradient, without_rows, of_a_single_class):
        assert logits_of(output) is None


class Unused(torch.autograd.Function):
    """Passes on what nothing is learned from, as DDP does with outputs that the loss is not made of."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("used", [True, False])
def test_logits_that_the_loss_is_not_made_of_get_no_gradient(used: bool) -> None:
    observer = Observer()
    model = torch.nn.Linear(3, 7)
    observer.attach(model)
    observer.trainer = lambda: (model, None, True)
    with observer.watching():
        logits = model(torch.ones(2, 3))
        if not used:
            logits = Unused.apply(logits)  # type: ignore[no-untyped-call]
        loss = cross_entropy(logits, torch.tensor([1, 2]))
        loss.backward()  # type: ignore[no-untyped-call]
        known = [weights.known for weights in observer.token_weights]
    expected = [True] if used else []
    assert known == expected
