"""DeepSpeed 0.19.8: ``engine.training`` stays True after ``engine.eval()``.

``DeepSpeedEngine.train`` and ``eval`` override those of ``nn.Module``, pass the mode on to the module that they wrap, and leave
the engine's own as it was. Code that evaluates and then restores the mode (``was = model.training; model.eval(); ...;
model.train(was)``) puts a model that was in evaluation mode into training mode: dropout is on. Expected: ``engine.training`` is
that of the module. Seen: it is True.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29602"}

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

wrong = []
for stage in (0, 1, 2, 3):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.eval()
    if engine.training != model.training:
        wrong.append(
            f"ZeRO-{stage}: engine.training is {engine.training}, that of the module {model.training}"
        )
print("SEEN" if wrong else "GONE", *wrong, sep="\n")
