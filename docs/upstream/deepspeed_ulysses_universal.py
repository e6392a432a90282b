"""DeepSpeed 0.19.8: a ZeRO-1 or 2 checkpoint of sequence parallelism (Ulysses) cannot be converted to a universal one.

The converter takes the ranks of a sequence for those of tensor parallelism, and looks for a model of each. Expected: a universal
checkpoint. Seen: ``Checkpoint model-state file count 1 does not match pp_degree=1 * tp_degree=2``.
"""

import os
import tempfile
from argparse import Namespace

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch import distributed, nn


def rank(number: int, directory: str) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(number),
        "LOCAL_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29624"}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo")
    parallel_state_sp.initialize_sequence_parallel(2)
    model = nn.Linear(4, 4)
    zero = {"stage": 1}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "sequence_parallel_size": 2,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, mpu=parallel_state_sp
    )
    engine.backward(engine(torch.ones(1, 4)).sum())
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
            print("SEEN" if "tp_degree=2" in str(error) else "GONE", error)
        else:
            print("GONE")
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(rank, (place,), 2)
