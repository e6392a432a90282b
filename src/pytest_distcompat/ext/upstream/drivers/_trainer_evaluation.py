"""An evaluation by ``Trainer.evaluate`` in which one batch has no labels, so that its loss is NaN.

Long prompts that were cut, or chats of which only the answers count, leave such batches. Trainer
leaves their losses out, as ``TrainingArguments.logging_nan_inf_filter`` says.

``TrainerDriver.metrics`` adds the result to its metrics, which the check ``evaluation`` compares
with those of one process.
"""

from __future__ import annotations

import tempfile
from typing import Any

#: Rows of a batch, and the label that ``cross_entropy`` leaves out.
BATCH, NO_LABEL = 2, -100
#: The labels of all rows, in their order. The second batch has none, as one of each set of two.
LABELS = (0, 1, NO_LABEL, NO_LABEL, 1, NO_LABEL, 0, 0)


def metrics(device: str = "cpu") -> dict[str, float]:
    """Return the loss over these rows, as ``{"no labels: loss": 0.69}``.

    Args:
        device: ``cpu`` or that of this rank.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments

    rows = [{"features": [float(number)], "labels": label} for number, label in enumerate(LABELS)]
    # Trainer makes its output directory, although it saves nothing.
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            per_device_eval_batch_size=BATCH,
            use_cpu=device == "cpu",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=_classifier(), args=arguments, eval_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        evaluated = trainer.evaluate()
    return {"no labels: loss": float(evaluated["eval_loss"])}


def _classifier() -> Any:
    """Return a module that maps a number to logits of two classes, the same in each process."""
    import torch

    class Classifier(torch.nn.Module):
        """One linear layer, which returns a loss as models of transformers do."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 2)
            torch.nn.init.constant_(self.linear.weight, 0.125)
            self.linear.bias.data = torch.tensor([0.25, -0.25])

        def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            """Return loss and logits of a batch: (batch, 1) and (batch)."""
            logits = self.linear(features)
            loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=NO_LABEL)
            return {"loss": loss, "logits": logits}

    return Classifier()
