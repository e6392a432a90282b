"""Reader of the weight that each token has in a loss: from the gradient of the logits, whoever computed the loss of them."""

from __future__ import annotations

from typing import Any

import torch

from pytest_distcompat.trace import RowWeight, TokenWeights

#: How far, relative to a token's weight, a gradient may be from that of cross-entropy: bfloat16 rounds to 8 bits.
TOLERANCE = 0.02
#: A label that is as probable leaves a gradient that is too small to tell a weight from.
MOST_PROBABLE = 0.99


def logits_of(output: Any) -> torch.Tensor | None:
    """Return the logits in what a model returned, of shape (rows, ..., classes); None if there are none to read."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or hasattr(logits, "placements"):
        return None
    if not (
        logits.requires_grad
        and logits.is_floating_point()
        and logits.dim() >= 2
        and logits.shape[-1] > 1
    ):
        return None
    return logits


def read_weights(logits: torch.Tensor, gradient: torch.Tensor) -> TokenWeights:
    """Return the weight of each token in a loss, of which ``gradient`` is that of the logits.

    The gradient of cross-entropy is the probability of each class, less 1 for the label, times the token's weight. Of another
    loss nothing is known.

    Args:
        logits: Of shape (rows, ..., classes).
        gradient: Of the same shape.
    """
    classes = logits.shape[-1]
    with torch.no_grad():
        probabilities = logits.detach().float().softmax(-1).reshape(len(logits), -1, classes)
        gradients = gradient.detach().float().reshape(len(logits), -1, classes)
        # No other class has a negative gradient.
        labels = gradients.argmin(-1, keepdim=True)
        trained = gradients.abs().amax(-1) > 0
        weights = gradients.gather(-1, labels) / (probabilities.gather(-1, labels) - 1)
        expected = probabilities.scatter_add(-1, labels, torch.full_like(weights, -1.0)) * weights
        wrong = (gradients - expected).abs().amax(-1) > TOLERANCE * weights.squeeze(-1).abs()
        told = trained & (probabilities.gather(-1, labels).squeeze(-1) < MOST_PROBABLE)
        if not bool(torch.isfinite(gradients).all()) or bool((wrong & told).any()):
            return TokenWeights(())
        rows: list[RowWeight] = []
        for nth in range(len(logits)):
            of_row = weights[nth, told[nth], 0]
            count = int(trained[nth].sum())
            if not len(of_row):
                if count:
                    return TokenWeights(())
                continue
            mean = float(of_row.mean())
            if float((of_row - mean).abs().max()) > TOLERANCE * abs(mean):
                return TokenWeights(())
            rows.append(RowWeight(count, mean))
    return TokenWeights(tuple(rows), known=True)
