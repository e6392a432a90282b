"""Evaluations by ``Trainer.evaluate`` of rows as users have them.

- One batch has no labels, so that its loss is NaN. Long prompts that were cut, or chats of which
  only the answers count, leave such batches. Trainer leaves their losses out, as
  ``TrainingArguments.logging_nan_inf_filter`` says.
- Labels are numbers of Python or of numpy, or tensors, one or several a row. Trainer's own collator
  joins them: https://huggingface.co/docs/transformers/main_classes/data_collator

``TrainerDriver.metrics`` adds the results to its metrics, which the check ``evaluation`` compares
with those of one process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from typing import Any

#: Rows of a batch, and the label that ``cross_entropy`` leaves out.
BATCH, NO_LABEL = 2, -100
#: The labels of all rows, in their order. The second batch has none, as one of each set of two.
LABELS = (0, 1, NO_LABEL, NO_LABEL, 1, NO_LABEL, 0, 0)
#: The labels of rows that are collated, none of which is left out.
CLASSES = (0, 1, 1, 0)


def metrics(device: str = "cpu") -> dict[str, float]:
    """Return the loss over each kind of rows, as ``{"no labels: loss": 0.69}``.

    Args:
        device: ``cpu`` or that of this rank.
    """
    losses: dict[str, float] = {}
    for kind, rows in _kinds_of_rows().items():
        losses[f"{kind}: loss"] = _loss(rows, device)
    return losses


def _kinds_of_rows() -> dict[str, list[dict[str, Any]]]:
    """Return rows by what is special about their labels: ``{"no labels": [{...}, ...]}``."""
    import numpy as np
    import torch

    several = [[label] for label in CLASSES]
    return {
        "no labels": _rows("labels", LABELS, int),
        "Python numbers as label": _rows("label", CLASSES, int),
        "numpy numbers as label": _rows("label", CLASSES, np.int64),
        "tensors as label": _rows("label", CLASSES, torch.tensor),
        "Python numbers as label_ids": _rows("label_ids", several, list),
        "numpy numbers as label_ids": _rows("label_ids", several, np.array),
        "tensors as label_ids": _rows("label_ids", several, torch.tensor),
    }


def _rows(name: str, labels: Iterable[Any], form: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Return a row for each label, with its number as its only feature.

    Args:
        name: What the rows call their labels: ``label``.
        labels: The label of each row, or a list of labels.
        form: Makes of it what the row has: ``torch.tensor``.
    """
    rows: list[dict[str, Any]] = []
    for number, label in enumerate(labels):
        rows.append({"features": [float(number)], name: form(label)})
    return rows


def _loss(rows: list[dict[str, Any]], device: str) -> float:
    """Return the loss over rows, as Trainer computes it."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

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
    return float(evaluated["eval_loss"])


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
            """Return loss and logits of a batch: features (batch, 1), one label for each row."""
            logits = self.linear(features)
            classes = labels.flatten()
            loss = torch.nn.functional.cross_entropy(logits, classes, ignore_index=NO_LABEL)
            return {"loss": loss, "logits": logits}

    return Classifier()
