"""DeepSpeed 0.19.8: under ZeRO-3 an evaluation in ``torch.inference_mode`` between two micro-batches ends training.

Parameters that ZeRO-3 gathers in inference mode are inference tensors, and some stay gathered for the next forward, which may
not save them for its backward. Met elsewhere: https://github.com/snowflakedb/ArcticTraining/pull/265. Expected: the second
micro-batch works, as under ZeRO-2, and after ``no_grad``. Seen: ``Inference tensors cannot be saved for backward``.
"""

import os

os.environ |= {
    "LOCAL_SIZE": "2",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29606",
}

import deepspeed
import torch


def micro_after_evaluation(stage: int) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    with torch.inference_mode():
        engine(torch.ones(1, 4))
    try:
        engine.backward(engine(torch.ones(1, 4)).sum())
    except RuntimeError as error:
        return str(error).partition(".")[0]
    return ""


def rank(number: int) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo")
    found = {f"ZeRO-{stage}": micro_after_evaluation(stage) for stage in (2, 3)}
    if number == 0:
        print("SEEN" if any(found.values()) else "GONE", found)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
