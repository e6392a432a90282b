"""torch 2.13.0: ``torch.optim.Muon`` refuses a number of Newton-Schulz steps in its first step only.

Expected: a ValueError when the optimizer is made, as for its other arguments. Seen: the ValueError after the first backward pass.
"""

import torch

model = torch.nn.Linear(4, 4, bias=False)
try:
    optimizer = torch.optim.Muon(model.parameters(), ns_steps=100)
except ValueError as error:
    print("GONE", error)
    raise SystemExit from None
model(torch.ones(2, 4)).sum().backward()
try:
    optimizer.step()
    print("GONE it took a step")
except ValueError as error:
    print("SEEN", error)
