"""accelerate 1.15.0, torchao 0.18.0: without FSDP2 the default torchao recipe of mixed_precision="fp8" trains no 8-bit layer.

Expected: the optimizer that is prepared with the model trains it. Seen: the recipe is for all-gather in 8 bits, which makes new
parameters of the weights; the optimizer holds the old ones, and no layer in 8 bits ever moves. No error, and the loss falls.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs

model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
model, optimizer = accelerator.prepare(model, optimizer)
before = {name: one.detach().float().clone() for name, one in model.named_parameters()}
accelerator.backward(model(torch.randn(16, 32)).square().mean())
optimizer.step()
still = [
    name
    for name, one in model.named_parameters()
    if torch.equal(one.detach().float(), before[name])
]
print(f"SEEN these did not move: {still}" if still else "GONE")
