"""DeepSpeed 0.19.8: the checkpoint of a pipeline with few layers cannot become a universal one.

``ds_to_universal`` takes the first and the last file of a layer for embeddings and norm, as those
of Megatron are, and divides the number of the others by that of the stages. With fewer than stages
that is 0, and it divides by it.

Expected: the checkpoint of 3 layers in 2 stages is converted. Seen: ZeroDivisionError.
"""

import os
import tempfile
from argparse import Namespace
from datetime import timedelta

import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.checkpoint.ds_to_universal import main
from deepspeed.pipe import PipelineModule


def run(rank: int, place: str, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29610", "OMP_NUM_THREADS": "1"}  # fmt: skip
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=60))
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    module = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    optimizer = torch.optim.AdamW(module.parameters())
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1, 4))]))
    engine.save_checkpoint(place, tag="a")
    if rank == 0:
        arguments = Namespace(
            input_folder=f"{place}/a",
            output_folder=f"{place}/b",
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        try:
            main(arguments)
            results.put("it is converted")
        except ZeroDivisionError as error:
            results.put(f"ZeroDivisionError: {error}")
    torch.distributed.barrier()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(run, (place, results), nprocs=2)
    result = results.get()
    print("GONE" if result == "it is converted" else "SEEN", result)
