"""torch 2.13.0: a checkpoint of a fresh optimizer changes the training (https://github.com/pytorch/pytorch/issues/164929).

``get_state_dict`` and ``get_optimizer_state_dict`` make the state of a fresh optimizer by a step without gradients, and leave
Adam's step count at 1: the first real step has the second one's bias correction. Expected: the same weight. Seen: 0.74 of
the first step.
"""

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def train(*, look: bool) -> float:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    if look:
        get_optimizer_state_dict(model, optimizer)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return model.weight.item()


looked, alone = train(look=True), train(look=False)
print(
    "SEEN" if abs(looked - alone) > 1e-3 else "GONE",
    f"after one step {looked:.4f}; without the state dict {alone:.4f}",
)
