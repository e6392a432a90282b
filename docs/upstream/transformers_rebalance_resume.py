"""transformers 5.23.0: ``train_sampling_strategy="batch_rebalance"`` resumes an epoch in the order of the first.

Trainer sets the epoch of the sampler in the loader's batch sampler. Once batches are skipped, one more batch sampler is around it,
that of ``skip_first_batches``, and the epoch reaches none. Expected: a training that resumes goes on with the rows that it has not
seen. Seen: with rows of the first epoch's order.
"""

import os
import tempfile

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

rows = [{"input_ids": torch.tensor([row]), "labels": torch.tensor([0.0])} for row in range(16)]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[int] = []

    def forward(self, input_ids, labels):
        self.seen += input_ids.flatten().tolist()
        return {"loss": (self.weight * labels).sum()}


class Saving(TrainerCallback):
    def on_step_end(self, _args, state, control, **_):
        control.should_save = state.global_step == 6


def train(directory: str, checkpoint: str | None) -> list[int]:
    arguments = TrainingArguments(
        output_dir=directory,
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        train_sampling_strategy="batch_rebalance",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    model = Model()
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Saving()])
    trainer.train(resume_from_checkpoint=checkpoint)
    return model.seen


def rank(number: int, directory: str) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29645"}
    whole = train(directory, None)
    resumed = train(directory, f"{directory}/checkpoint-6")
    # Lengths are equal: each rank has two rows a step, and four steps an epoch.
    rest = whole[12:]
    if number == 0:
        print("SEEN" if resumed != rest else "GONE", f"{rest}; resumed {resumed}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (tempfile.mkdtemp(),), 2)
