"""transformers 5.23.0: the ``eval_loss`` of several processes counts rows that fill the last batch, where rows do not divide.

The last rank's incomplete batch is filled with rows of the beginning, and their loss is in the batch's mean, of which
``gather_for_metrics`` can leave out copies only. Expected: the loss of one process. Seen: another on two ranks.
"""

import os
import tempfile

import torch
import torch.multiprocessing as mp
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, labels):
        return {"loss": (self.scale * labels).mean(), "logits": x}


def run(rank: int, ranks: int, port: str, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}  # fmt: skip
    rows = [
        {"x": torch.tensor([value]), "labels": torch.tensor([value])} for value in (0.0, 0.0, 1.0)
    ]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            per_device_eval_batch_size=2,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        found = Trainer(model=Model(), args=arguments, eval_dataset=rows).evaluate()["eval_loss"]
    if rank == 0:
        results.put(found)


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (1, "29563", results), nprocs=1)
    mp.spawn(run, (2, "29564", results), nprocs=2)
    alone, found = results.get(), results.get()
    print(
        "GONE" if abs(found - alone) < 1e-4 else "SEEN",
        f"eval_loss is {found:.4g} on two ranks, {alone:.4g} on one",
    )
