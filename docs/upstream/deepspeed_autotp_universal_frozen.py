"""DeepSpeed 0.19.8: an AutoTP checkpoint of a model with a frozen layer cannot be converted to a universal one.

The checkpoint lists every parameter that is on all ranks, also those that have no optimizer state to merge; a list entry that
no merged parameter matches is an error. Expected: a universal checkpoint. Seen: ``AssertionError: Unused patterns``.
"""

import os
import tempfile
from argparse import Namespace

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main
from torch import distributed, nn


def rank(number: int, directory: str) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(number),
        "LOCAL_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29622"}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo")
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    specs = {"use_default_specs": False, "layer_specs": [{"patterns": [r"0\.weight$"]}]}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2, "partition_config": specs},
    }
    optimizer = torch.optim.AdamW(model[0].parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine.module[0](torch.ones(1, 4)).sum())
    engine.step()
    engine.save_checkpoint(directory, tag="a")
    distributed.barrier()
    if number == 0:
        folders = {
            "input_folder": f"{directory}/a",
            "output_folder": f"{directory}/b",
            "keep_temp_folder": False,
        }
        workers = {"num_extract_workers": 1, "num_merge_workers": 1}
        try:
            main(Namespace(**folders, **workers, strict=True, inject_missing_state=False))
        except AssertionError as error:
            print("SEEN" if "Unused patterns" in str(error) else "GONE", error)
        else:
            print("GONE")
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(rank, (place,), 2)
