"""transformers 5.23.0: loading a checkpoint rounds the state of ``transformers.optimization.Adafactor`` for bfloat16 parameters.

It keeps its state in float32, also for parameters in bfloat16, and does not override ``load_state_dict``, by which torch casts
floating point state to the dtype of the parameter. Expected: the state that was saved. Seen: state in bfloat16, whose next use
widens it again, so that a resumed training goes on from rounded moments.
"""

import torch
from transformers.optimization import Adafactor

torch.manual_seed(0)


def make() -> tuple[torch.nn.Linear, Adafactor]:
    """Return a layer in bfloat16 and its optimizer."""
    layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    return layer, Adafactor(layer.parameters(), lr=1e-3, scale_parameter=False, relative_step=False)


(layer, saved), (_, loaded) = make(), make()
layer(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
saved.step()
loaded.load_state_dict(saved.state_dict())
before, after = (next(iter(one.state.values()))["exp_avg_sq_row"] for one in (saved, loaded))
print(
    "SEEN" if after.dtype != before.dtype else "GONE",
    f"{before.dtype} was saved, {after.dtype} is loaded",
)
