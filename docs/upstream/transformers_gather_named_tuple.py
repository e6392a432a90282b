"""transformers 5.23.0: ``nested_gather`` raises TypeError for a named tuple.

``distributed_concat``, which it calls, calls the type of a tuple with a generator; a named tuple takes its parts one by one, as
accelerate's ``gather`` knows. Expected: a named tuple of gathered tensors. Seen: TypeError (missing 1 required positional argument).
"""

import os
from typing import NamedTuple

import torch
import torch.multiprocessing as mp
from transformers.trainer_pt_utils import distributed_concat


class Outputs(NamedTuple):
    """What a model returns."""

    loss: torch.Tensor
    logits: torch.Tensor


def run(rank: int, results) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29591",
    }
    torch.distributed.init_process_group("gloo")
    try:
        gathered = distributed_concat(Outputs(torch.tensor([1.0 + rank]), torch.tensor([3.0])))
        result = str(gathered.loss.tolist())
    except TypeError as error:
        result = f"TypeError: {error}"
    if rank == 0:
        results.put(result)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=2)
    result = results.get()
    print("GONE" if result == "[1.0, 2.0]" else "SEEN", result)
