"""DeepSpeed 0.19.8: with ``use_node_local_storage`` only the node of rank 0 gets the file ``latest``.

It was each node before 0.17.1 (https://github.com/deepspeedai/DeepSpeed/pull/7215).
``load_checkpoint`` without a tag reads it. Expected: each node has it, as its first rank saves the rest. Seen: on other nodes the
load returns ``None, None`` after a warning, and training goes on with fresh weights there; Trainer's ``save_on_each_node``, which
sets that key and passes no tag, raises on them.
"""

import os
import tempfile
from pathlib import Path

os.environ |= {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29612",
    "LOCAL_RANK": "0",
    "LOCAL_SIZE": "1",
}

import deepspeed
import torch
from torch import multiprocessing

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU


def node(rank, place):
    """One rank, the first of a node with a directory of its own."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    deepspeed.init_distributed(dist_backend="gloo")
    model = torch.nn.Linear(8, 8)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "checkpoint": {"use_node_local_storage": True},
    }
    engine = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
    )[0]
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    engine.save_checkpoint(f"{place}/{rank}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        context = multiprocessing.get_context("spawn")
        nodes = [context.Process(target=node, args=(rank, place)) for rank in range(2)]
        for one in nodes:
            one.start()
        for one in nodes:
            one.join(100)
        found = [
            sorted(path.name for path in Path(place, str(rank)).glob("*")) for rank in range(2)
        ]
    print(
        "SEEN" if "latest" in found[0] and "latest" not in found[1] else "GONE",
        f"the nodes have {found}",
    )
