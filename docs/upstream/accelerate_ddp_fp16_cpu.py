"""accelerate 1.15.0: mixed_precision="fp16" on the CPU trains in float32, without a word.

Expected: an error, or autocast in float16, which torch has for the CPU. Seen: products in float32.
"""

import os

os.environ |= {"CUDA_VISIBLE_DEVICES": ""}

import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode

seen = set()


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in str(function):
            seen.add(args[-1].dtype)
        return function(*args, **(kwargs or {}))


accelerator = Accelerator(mixed_precision="fp16", cpu=True)
model = accelerator.prepare(torch.nn.Linear(4, 4))
with Watch():
    model(torch.ones(2, 4))
print(
    "SEEN" if seen == {torch.float32} else "GONE",
    f"asked for {accelerator.mixed_precision}, products in {seen}",
)
