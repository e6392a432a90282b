"""transformers 5.23.0: resumed in an epoch, ``train_sampling_strategy="group_by_length"`` gives other rows.

``LengthGroupedSampler`` draws the order of an epoch from torch's global generator when the epoch begins. Trainer seeds the
sampler of random order by the epoch, and not this one: a resumed run draws an order of its own, and skips as many batches of it.
Expected: the rows of the run that never stopped. Seen: others, some of them for the second time in the epoch.
"""

import tempfile

import torch
from transformers import Trainer, TrainingArguments


class Recorder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.fed = []

    def forward(self, x):
        self.fed.append(x.flatten().tolist())
        return {"loss": (self.scale * x).sum()}


def collate(rows):
    return {"x": torch.stack([row["x"] for row in rows])}


rows = [{"x": torch.tensor([float(row)]), "input_ids": [0] * (1 + row % 5)} for row in range(16)]


def train(directory, checkpoint=None):
    arguments = TrainingArguments(
        directory,
        use_cpu=True,
        per_device_train_batch_size=2,
        num_train_epochs=2,
        train_sampling_strategy="group_by_length",
        save_steps=10,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
    )
    model = Recorder()
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collate)
    trainer.train(resume_from_checkpoint=checkpoint)
    return model.fed


with tempfile.TemporaryDirectory() as directory:
    whole = train(directory)
    resumed = train(directory, f"{directory}/checkpoint-10")
    expected = whole[10:]
    print("GONE" if resumed == expected else "SEEN", f"resumed {resumed}; expected {expected}")
