"""torch 2.13.0, torchao 0.18.0: a full optimizer state has tensors in it that were not waited for.

``get_optimizer_state_dict(..., full_state_dict=True)`` gathers each DTensor. The state of torchao's
8-bit optimizers is a tensor made of others, and the gathered parts stay ``AsyncCollectiveTensor``
inside it. What is saved of it cannot be loaded by ``torch.load``, which knows no such class.

Expected: the file can be loaded. Seen: UnpicklingError.
"""

import io
import os

import torch
import torch.multiprocessing as mp
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torchao.optim import AdamW8bit


def run(rank: int, results) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29614",
    }
    distributed.init_process_group("gloo")
    model = torch.nn.Linear(128, 128, bias=False)
    fully_shard(model)
    optimizer = AdamW8bit(model.parameters())
    model(torch.ones(1, 128)).sum().backward()
    # The step of the optimizer is compiled otherwise.
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if rank == 0:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        try:
            torch.load(file, weights_only=True)
            results.put("it is loaded")
        except Exception as error:
            (line,) = [line for line in str(error).splitlines() if "Unsupported global" in line]
            results.put(f"{type(error).__name__}: {line.strip()[:110]}")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=2)
    result = results.get()
    print("GONE" if result == "it is loaded" else "SEEN", result)
