"""DeepSpeed 0.19.8: a ZeRO-2 checkpoint with ``elastic_checkpoint`` cannot be converted to a universal one.

An elastic checkpoint has the optimizer's state as a list, one entry a group. ``ZeROCheckpoint`` reads a dictionary.
Expected: it is converted, or refused with a message, as in its own load (``deepspeed_elastic_checkpoint.py``). Seen:
an AttributeError in ``main``.
"""

import os
import tempfile
from argparse import Namespace

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29616"}

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

model = torch.nn.Linear(8, 8)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2, "elastic_checkpoint": True},
}
engine = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
)[0]
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
with tempfile.TemporaryDirectory() as place:
    engine.save_checkpoint(place, tag="a")
    folders = {
        "input_folder": f"{place}/a",
        "output_folder": f"{place}/b",
        "keep_temp_folder": False,
    }
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    try:
        main(Namespace(**folders, **workers, strict=True, inject_missing_state=True))
    except AttributeError as error:
        print(f"SEEN AttributeError: {error}")
    else:
        print("GONE it is converted")
