"""Record of what a dropout dropped, from its input and its output.

``observe.Observer`` calls ``read_dropout`` in a forward hook of each dropout of the model. The
check ``randomness`` compares the records: ranks with different batches must drop different
elements.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pytest_distcompat.probe.tensors import digest, local_of, valueless
from pytest_distcompat.trace import DropoutInfo

#: Modules that drop single activations, with the probability ``p``.
DROPOUTS = (torch.nn.Dropout,)
#: A dropout is recorded only if it has so many elements that two independent modules would drop the
#: same ones with a probability of at most 2 ** -CHANCE.
CHANCE = 30


def read_dropout(name: str, p: float, given: Any, output: Any) -> DropoutInfo | None:
    """Return what a dropout dropped; None if an independent one might drop the same by chance.

    Args:
        name: The name of the module: ``layers.0.dropout``.
        p: The probability with which it drops an element.
        given: Its input, a tensor.
        output: Its output.
    """
    # With p of 0 or 1 all dropouts drop the same. A fake tensor (torch's ``FakeTensor``) has no
    # values.
    if not 0 < p < 1 or valueless(given):
        return None
    # ``local_of`` returns this rank's part of a DTensor, ``digest`` a short text that is equal for
    # equal values.
    given = local_of(given).detach()
    output = local_of(output).detach()
    # If an element of the input is zero, the output does not show whether it was dropped.
    visible = given != 0
    # The probability that two independent modules agree on one element.
    agreement = p * p + (1 - p) ** 2
    if int(visible.sum()) * -math.log2(agreement) < CHANCE:
        return None
    dropped = (output == 0) & visible
    return DropoutInfo(name=name, input=digest(given), zeros=digest(dropped))
