"""transformers 5.23.0: ``dataloader_drop_last`` is ignored of an iterable dataset.

``Trainer._get_dataloader`` hands it to the loader of a dataset with a length only. Expected: batches of 2 rows, and the fifth
left out. Seen: a last batch of one row, whose mean counts as much as that of two.
"""

import tempfile

import torch
from transformers import Trainer, TrainingArguments


class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([{"x": torch.tensor([float(row)])} for row in range(5)])


with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        directory,
        use_cpu=True,
        per_device_train_batch_size=2,
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        max_steps=1,
        remove_unused_columns=False,
        report_to="none",
    )
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=Rows())
    batches = [batch["x"].flatten().tolist() for batch in trainer.get_train_dataloader()]
    print("SEEN" if [4.0] in batches else "GONE", f"batches {batches}")
