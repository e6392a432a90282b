"""DeepSpeed 0.19.8: ``load_checkpoint`` does not name the file that it cannot read.

Expected: an error with the path. Seen: the error of ``torch.load`` for a file that is cut, an AssertionError without a text for
one that is gone.
"""

import os
import tempfile
from pathlib import Path

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29585"}

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")


def engine():
    model = torch.nn.Linear(8, 8)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    return deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
    )[0]


named = []
for damage in (lambda path: path.write_bytes(path.read_bytes()[:100]), Path.unlink):
    with tempfile.TemporaryDirectory() as place:
        engine().save_checkpoint(place, tag="one")
        (path,) = Path(place, "one").glob("*model_states.pt")
        damage(path)
        try:
            engine().load_checkpoint(place, tag="one")
            print("no error at all")
        except Exception as error:
            print(repr(error)[:120])
            named.append(path.name in str(error))
print("GONE" if all(named) else "SEEN", f"named: {named}")
