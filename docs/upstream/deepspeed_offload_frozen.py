"""DeepSpeed 0.19.8: ZeRO-3's ``reload_states`` gives frozen parameters the memory of trained ones.

``lp_param_buffer`` holds the trained parameters. ``reload_states`` narrows it for all parameters,
the frozen ones first, so that each gets other elements than its own. Expected: the engine goes on
as before. Seen: RuntimeError (start + length exceeds dimension size), where the buffer is too short
for all of them.
"""

import os

import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum


def run(rank: int, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29608", "OMP_NUM_THREADS": "1"}  # fmt: skip
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo")
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Linear(13, 5))
    model[0].requires_grad_(False)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    engine = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
    )[0]
    try:
        engine.offload_states(include=[OffloadStateTypeEnum.lp_params], pin_memory=False)
        engine.reload_states()
        result = "it goes on"
    except RuntimeError as error:
        result = f"RuntimeError: {error}"
    if rank == 0:
        results.put(result)
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=2)
    result = results.get()
    print("GONE" if result == "it goes on" else "SEEN", result)
