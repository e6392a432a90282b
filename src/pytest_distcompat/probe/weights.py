"""Reader of the weight of each token in a loss, from the gradient of the logits alone.

``observe.Observer`` calls ``logits_of`` with what the model returned, registers a hook on the
logits, and calls ``read_weights`` once autograd has computed their gradient. Checks then see
whether each token weighs the same on all ranks and in all micro-batches. A trainer that takes the
mean over each rank's tokens, and then over ranks, gives tokens of short rows more weight.

Example: two rows with 2 and 3 trained tokens whose loss is the mean over all 5 tokens have the
weights ``RowWeight(2, 0.2)`` and ``RowWeight(3, 0.2)``.
"""

from __future__ import annotations

from typing import Any

import torch

from pytest_distcompat.trace import RowWeight, TokenWeights

#: How far a gradient may be from that of cross-entropy, relative to the token's weight. bfloat16
#: rounds to 8 bits.
TOLERANCE = 0.02
#: The highest probability of a label at which its gradient is large enough to show the token's
#: weight.
MOST_PROBABLE = 0.99


def logits_of(output: Any) -> torch.Tensor | None:
    """Return the logits in a model's output, of shape (rows, ..., classes); None if there are none.

    The output is a tensor, or an object with ``logits`` as those of transformers. Logits that are a
    DTensor are not read, because a rank has only a shard of them.
    """
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or hasattr(logits, "placements"):
        return None
    if not logits.requires_grad or not logits.is_floating_point():
        return None
    if logits.dim() < 2 or logits.shape[-1] <= 1:
        return None
    return logits


def read_weights(logits: torch.Tensor, gradient: torch.Tensor) -> TokenWeights:
    """Return the weight of the tokens of each row in a loss.

    If the loss is a weighted sum of the tokens' cross-entropies, the gradient of a token's logits
    is its weight times (the probabilities of the classes, less 1 for the label). That gives the
    weight. The weights are unknown if the gradients do not have this form, as those of another
    loss, or if tokens of one row differ in weight.

    Args:
        logits: Of shape (rows, ..., classes).
        gradient: The gradient of the loss for the logits, of the same shape.
    """
    unknown = TokenWeights(())
    shape = (len(logits), -1, logits.shape[-1])
    with torch.no_grad():
        # All of shape (rows, tokens, classes).
        probabilities = logits.detach().float().softmax(-1).reshape(shape)
        gradients = gradient.detach().float().reshape(shape)
        # Of the gradients of a token only the label's is negative, since a probability is below 1.
        labels = gradients.argmin(-1, keepdim=True)
        probabilities_of_labels = probabilities.gather(-1, labels)
        weights = gradients.gather(-1, labels) / (probabilities_of_labels - 1)
        minus_1 = torch.full_like(weights, -1.0)
        expected = probabilities.scatter_add(-1, labels, minus_1) * weights
        # From here on of shape (rows, tokens).
        weights = weights.squeeze(-1)
        deviations = (gradients - expected).abs().amax(-1)
        has_other_form = deviations > TOLERANCE * weights.abs()
        is_trained = gradients.abs().amax(-1) > 0
        is_uncertain = probabilities_of_labels.squeeze(-1) < MOST_PROBABLE
        shows_weight = is_trained & is_uncertain
        if not bool(torch.isfinite(gradients).all()):
            return unknown
        if bool((has_other_form & shows_weight).any()):
            return unknown
        rows: list[RowWeight] = []
        for nth in range(len(logits)):
            count = int(is_trained[nth].sum())
            if not count:
                continue
            row_weights = weights[nth, shows_weight[nth]]
            if not len(row_weights):
                return unknown
            mean = float(row_weights.mean())
            largest_deviation = float((row_weights - mean).abs().max())
            if largest_deviation > TOLERANCE * abs(mean):
                return unknown
            rows.append(RowWeight(count, mean))
    return TokenWeights(tuple(rows), known=True)
