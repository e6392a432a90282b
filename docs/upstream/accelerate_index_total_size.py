"""accelerate 1.15.0, huggingface_hub 2.4.0: `save_model` counts the memory behind a tensor, not the tensor, in its index.

`split_torch_state_dict_into_shards` adds `untyped_storage().nbytes()` up. Expected: `total_size` is the size of the tensors in
the files. Seen: 56 for 52 bytes. DeepSpeed's ZeRO-3 pads what it gathers to a multiple of the ranks, and on the CPU its state
dict has views of that, so that each weight with an odd number of elements adds to `total_size`.
"""

import json
import os
import tempfile
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from accelerate import Accelerator

model = torch.nn.Module()
model.weight = torch.nn.Parameter(torch.zeros(8))
# As gathered over two ranks.
model.bias = torch.nn.Parameter(torch.zeros(6)[:5])
with tempfile.TemporaryDirectory() as directory:
    Accelerator(cpu=True).save_model(model, directory, max_shard_size=30)
    index = json.loads(Path(directory, "model.safetensors.index.json").read_text())
size = sum(parameter.nbytes for parameter in model.parameters())

print(
    "SEEN" if index["metadata"]["total_size"] != size else "GONE",
    index["metadata"]["total_size"],
    "for",
    size,
)
