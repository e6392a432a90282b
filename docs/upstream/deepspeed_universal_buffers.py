"""DeepSpeed 0.19.8: loading a universal checkpoint restores no buffer, such as BatchNorm's statistics, without a word.

``_load_checkpoint`` skips ``load_module_state_dict`` for one, and the optimizer's files hold parameters alone. Expected: the
count of batches that was saved. Seen with every stage: 0, as in a new model.
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
    """ZeRO-1 around a layer with BatchNorm."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}, **more}
    return deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
    )[0]


with tempfile.TemporaryDirectory() as place:
    one = engine()
    one.backward(one(torch.randn(4, 8)).square().sum())
    one.step()
    one.save_checkpoint(place, tag="a")
    folders = {
        "input_folder": f"{place}/a",
        "output_folder": f"{place}/b",
        "keep_temp_folder": False,
    }
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    main(Namespace(**folders, **workers, strict=True, inject_missing_state=True))
    two = engine(checkpoint={"load_universal": True})
    two.load_checkpoint(place, tag="b")

counts = [int(one.module[1].num_batches_tracked), int(two.module[1].num_batches_tracked)]
print(
    "GONE" if counts[0] == counts[1] else "SEEN",
    f"{counts[0]} batches were counted at the save, {counts[1]} after the load",
)
