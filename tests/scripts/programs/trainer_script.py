"""A script of transformers.Trainer, with its arguments on the command line."""

import argparse
from pathlib import Path

from tiny import Rows, model  # type: ignore[import-not-found]  # it lies beside the script
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--save-at", type=int, default=0)
parser.add_argument("--resume", type=Path)
parser.add_argument("--bf16", action="store_true")
arguments = parser.parse_args()

trainer = Trainer(
    model=model(),
    args=TrainingArguments(
        output_dir=str(arguments.output),
        per_device_train_batch_size=2,
        max_steps=arguments.steps,
        learning_rate=1e-2,
        bf16=arguments.bf16,
        save_strategy="steps" if arguments.save_at else "no",
        save_steps=arguments.save_at or 500,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    ),
    train_dataset=Rows(),
)
trainer.train(resume_from_checkpoint=str(arguments.resume) if arguments.resume else None)
trainer.save_model(str(arguments.output / "final"))
