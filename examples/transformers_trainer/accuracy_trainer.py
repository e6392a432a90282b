"""A subclass of transformers.Trainer, as many projects have one: it keeps the accuracy of the next token beside the loss."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer


class AccuracyTrainer(Trainer):  # type: ignore[misc]  # transformers is untyped here
    """Trains as Trainer does."""

    accuracy: float | None = None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, return_outputs: bool = False, **more: Any) -> Any:
        """Trainer's own loss; the accuracy on the way."""
        loss, outputs = super().compute_loss(model, inputs, *args, return_outputs=True, **more)
        labels = inputs["labels"][..., 1:]
        found = outputs["logits"].detach().argmax(dim=-1)[..., :-1]
        counted = labels != -100
        self.accuracy = float((found == labels)[counted].to(torch.float32).mean())
        return (loss, outputs) if return_outputs else loss
