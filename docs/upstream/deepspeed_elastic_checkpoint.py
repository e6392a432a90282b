"""DeepSpeed 0.19.8: a ZeRO-2 checkpoint with ``elastic_checkpoint`` and torch's AdamW is saved and cannot be loaded.

It is loaded with the step count of ``param_groups``, which torch's optimizers keep in their state. Expected: the checkpoint
loads, or ``elastic_checkpoint`` is refused when the engine is created. Seen: an AssertionError without a message in the load.
"""

import os
import tempfile

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29591"}

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

model = torch.nn.Linear(8, 8)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2, "elastic_checkpoint": True},
}
engine = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
)[0]
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
with tempfile.TemporaryDirectory() as place:
    engine.save_checkpoint(place)
    try:
        engine.load_checkpoint(place)
    except AssertionError as error:
        print(f"SEEN AssertionError: {error}")
    else:
        print("GONE it loads")
