"""torchao 0.18.0: ``torchao.optim.AdamW8bit(amsgrad=True)`` cannot step.

The maximum of two states in 8 bits is not implemented. Expected: a step, or an error when the optimizer is made. Seen:
NotImplementedError in the first step.
"""

import torch
from torchao.optim import AdamW8bit

torch.compiler.set_stance("force_eager")
model = torch.nn.Linear(64, 64)
optimizer = AdamW8bit(model.parameters(), amsgrad=True)
model(torch.ones(2, 64)).sum().backward()
try:
    optimizer.step()
    print("GONE it took a step")
except NotImplementedError as error:
    print("SEEN" if "aten.maximum" in str(error) else "OTHER", str(error).splitlines()[0][:200])
