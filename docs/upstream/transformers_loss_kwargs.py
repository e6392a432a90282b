"""transformers 5.23.0: where a model ignores ``num_items_in_batch``, Trainer multiplies its loss by the number of processes.

Trainer takes ``**kwargs`` in a model's ``forward`` as a sign that its loss is divided by the items of all processes, and makes
up for the mean over processes that follows. Many classes have ``**kwargs`` and take the mean of their own items. Expected: the
loss and the gradient norm of one process. Seen: twice both on two processes; ``accepts_loss_kwargs = False`` in the class helps.
"""

import os
import tempfile

import torch
import torch.multiprocessing as mp
from transformers import FNetConfig, FNetForSequenceClassification, Trainer, TrainingArguments


def run(rank: int, ranks: int, port: str, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}  # fmt: skip
    torch.manual_seed(0)
    config = FNetConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
    )
    rows = [{"input_ids": torch.arange(8), "labels": torch.tensor(1)}] * 4
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory, max_steps=1, per_device_train_batch_size=4 // ranks, logging_steps=1, save_strategy="no",
            use_cpu=True, report_to="none", disable_tqdm=True)  # fmt: skip
        trainer = Trainer(
            model=FNetForSequenceClassification(config), args=arguments, train_dataset=rows
        )
        trainer.train()
    if rank == 0:
        results.put([trainer.state.log_history[0][name] for name in ("loss", "grad_norm")])


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (1, "29567", results), nprocs=1)
    mp.spawn(run, (2, "29568", results), nprocs=2)
    alone, found = results.get(), results.get()
    print(
        "GONE" if abs(found[0] / alone[0] - 1) < 1e-2 else "SEEN",
        f"on two ranks loss and gradient norm are {found[0]:.4g} and {found[1]:.4g}, {alone[0]:.4g} and {alone[1]:.4g} on one",
    )
