"""DeepSpeed 0.19.8: after the load of a universal checkpoint all groups of ZeRO-3 share one step tensor.

Expected: one more step counts [2.0, 2.0]. Seen with two parameter groups: [3.0, 3.0], for Adam counts the tensor up once for
each: its bias corrections are those of another step from then on.
"""

import os
import tempfile
from argparse import Namespace

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29574"}

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")


def engine(**more):
    """ZeRO-3 around one layer, weight decay on its weight only."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    groups = [
        {"params": [model.weight], "weight_decay": 0.01},
        {"params": [model.bias], "weight_decay": 0.0},
    ]
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, **more}
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)[0]


with tempfile.TemporaryDirectory() as place:
    one = engine()
    one.backward(one(torch.ones(1, 8)).sum())
    one.step()
    one.save_checkpoint(place, tag="a")
    main(
        Namespace(
            input_folder=f"{place}/a",
            output_folder=f"{place}/b",
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    two = engine(checkpoint={"load_universal": True})
    two.load_checkpoint(place, tag="b")

two.backward(two(torch.ones(1, 8)).sum())
two.step()
found = [float(state["step"]) for state in two.optimizer.optimizer.state.values()]
print(
    "SEEN" if found != [2.0, 2.0] else "GONE",
    f"one step after the load the groups count {found}; 1 was saved",
)
