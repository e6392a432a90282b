"""DeepSpeed 0.19.8: under Ulysses the engine cannot make the loader of ``training_data``.

``deepspeed_io`` asks the ``mpu`` for the data parallel world size and rank. The one that ``UlyssesSPAttentionHF`` returns for
``deepspeed.initialize(mpu=...)``, the module ``parallel_state_sp``, has functions of other names alone. Expected: a loader whose
ranks of one sequence get the same rows. Seen: ``AttributeError: ... has no attribute 'get_data_parallel_world_size'``.
"""

import os

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp


def rank(number: int) -> None:
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29629"}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo")
    parallel_state_sp.initialize_sequence_parallel(2)
    model = torch.nn.Linear(2, 2)
    try:
        deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2},
            mpu=parallel_state_sp,
            training_data=range(8),
        )
        found = "initialized"
    except AttributeError as error:
        found = str(error)
    if number == 0:
        print("SEEN" if "get_data_parallel_world_size" in found else "GONE", found)


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
