"""accelerate 1.15.0: on a GPU ``dynamo_backend`` turns TF32 on for the whole process, without a word.

``AcceleratorState`` sets ``torch.backends.cuda.matmul.allow_tf32`` if the precision is "no" and something is to be compiled.
Expected: products of float32 in float32, as without compilation, unless the user asks for TF32. Seen: they are in TF32,
with 13 bits less. Needs no GPU: the state is told that its device is one, and the flag is read.
"""

import torch
from accelerate import Accelerator, PartialState

PartialState(cpu=True).device = torch.device("cuda")
before = torch.backends.cuda.matmul.allow_tf32
Accelerator(dynamo_backend="aot_eager")
after = torch.backends.cuda.matmul.allow_tf32
print(
    "SEEN" if after and not before else "GONE",
    f"allow_tf32 is {after} with dynamo_backend; {before} before",
)
