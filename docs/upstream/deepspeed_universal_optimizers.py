"""DeepSpeed 0.19.8: a checkpoint can be converted to a universal one only if its optimizer is Adam.

The converter reads ``exp_avg`` and ``exp_avg_sq`` by name (https://github.com/deepspeedai/DeepSpeed/issues/8608). Expected: the
momentum of SGD, or of DeepSpeed's own Muon, is converted. Seen: KeyError.
"""

import os
import tempfile
from argparse import Namespace

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29637"}

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

model = torch.nn.Linear(8, 8)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
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
        print("GONE it was converted")
    except KeyError as error:
        print("SEEN" if "exp_avg" in str(error) else "OTHER", f"KeyError: {error}")
