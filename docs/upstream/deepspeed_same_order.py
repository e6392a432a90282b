"""deepspeed 0.19.8: the loader of ``initialize(training_data=...)`` has the same order in each epoch.

``DeepSpeedDataLoader`` makes a shuffling ``DistributedSampler`` and never calls its ``set_epoch``; the user cannot reach it but
by ``loader.data_sampler``, which is not documented. Expected: another order in each epoch. Seen: the same.
"""

import os

os.environ |= {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29562",
}
import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
model = torch.nn.Linear(1, 1)
config = {"train_micro_batch_size_per_gpu": 2}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
_, _, loader, _ = deepspeed.initialize(
    model=model, optimizer=optimizer, config=config, training_data=range(16)
)
first, second = ([row for batch in loader for row in batch.tolist()] for _ in range(2))
print("SEEN" if first == second else "GONE", f"first epoch {first}, second epoch {second}")
