"""DeepSpeed 0.19.8: a ZeRO-1 or 2 checkpoint with experts on several ranks cannot be converted to a universal one.

Each rank numbers its own experts from 0, and the converter joins those of one number as if they were parts of one tensor; that it
does not know them is not said (https://github.com/deepspeedai/DeepSpeed/issues/5716). ``zero_to_fp32`` does not know them either:
it takes the file of an expert for that of a model. Expected: both work, or refuse in words. Seen: ``shape is invalid for input``.
"""

import os
import tempfile
from argparse import Namespace

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import distributed, nn


def rank(number: int, directory: str) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(number),
        "LOCAL_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29633"}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo")
    model = MoE(
        4,
        nn.Linear(4, 4),
        num_experts=2,
        ep_size=2,
        min_capacity=0,
        drop_tokens=False,
        use_rts=False,
    )
    model = nn.ModuleDict({"moe": model})
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": [*model.parameters()], "name": "all"}
    )
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups), config=config
    )
    engine.backward(engine.module["moe"](torch.randn(8, 4))[0].square().sum())
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
            main(Namespace(**folders, **workers, strict=True, inject_missing_state=True))
        except RuntimeError as error:
            print("SEEN" if "is invalid for input" in str(error) else "GONE", error)
        else:
            print("GONE")
        try:
            print(sorted(get_fp32_state_dict_from_zero_checkpoint(directory, "a")))
        except ValueError as error:
            print("zero_to_fp32:", str(error).replace(directory, "..."))
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(rank, (place,), 2)
