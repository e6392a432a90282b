"""DeepSpeed 0.19.8: ``pipeline_loading_checkpoint`` is accepted under ZeRO-1 and ZeRO-2, whose checkpoints then cannot be loaded.

Expected: refused when the engine is created, before anything is saved. Seen: an AssertionError in ``load_checkpoint``.
"""

import os
import tempfile

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

model = torch.nn.Linear(8, 8)
zero = {"stage": 2, "pipeline_loading_checkpoint": True}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
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
