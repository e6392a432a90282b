"""The reference of the driver for Trainer: optimizer, schedule and loss as Trainer makes them.

The checks ``parity``, ``clipping`` and ``gradients`` compare the losses of the ranks with a
reference: one process that trains the same model in float32 on the batches of all ranks, without
Trainer. ``_tiny_reference.py`` has its loop, whose class calls the methods here. ``TrainerDriver``
inherits ``TrainerReference``.

Trainer itself makes its optimizer and its schedule of TrainingArguments. So the reference makes
equal ones here: param groups without weight decay for norms and biases, and the schedule
``inverse_sqrt``. Settings of a cell, such as ``TrainingArguments.adam_beta1=0.5``, change both:
``setting_or_default(0.9, KEY, ...)`` returns the value of the first key that the cell sets, or 0.9.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.ext.upstream.drivers._tiny_training import DECAY, LEARNING_RATE
from pytest_distcompat.ext.upstream.drivers.tiny import TinyDriver
from pytest_distcompat.scenario import STEPS

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.models import Batch

#: Arguments of TrainingArguments: the only decaying schedule that does not depend on the number of
#: all steps, which is another one in a resumed run. Before transformers 5 the time scale is not
#: passed on: it is 10,000 steps then, so that the rate hardly changes.
SCHEDULE: dict[str, Any] = {
    "lr_scheduler_type": "inverse_sqrt",
    "lr_scheduler_kwargs": {"timescale": 10},
}
#: Option ``optimizer`` -> its name in TrainingArguments, which have none for Muon.
OPTIMIZERS = {
    "adamw": "adamw_torch",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "adam8bit": "adamw_torch_8bit",
}
#: Trainer's names of optimizers of torch -> torch's.
TORCH_OPTIMIZERS = {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}


class TrainerReference(TinyDriver):
    """Driver whose reference trains as ``transformers.Trainer`` does."""

    #: What has equal weight in the loss of a step: each token of all ranks. The other values are
    #: ``micro_batch`` and ``rank``.
    mean: ClassVar[str] = "token"

    def groups(self, model: Module) -> Any:
        """Return Trainer's own two param groups, for the reference.

        The second one has norms and biases, without weight decay.
        """
        from transformers import Trainer

        decay = self.setting_or_default(
            DECAY, "TrainingArguments.weight_decay", "ds_config.optimizer.params.weight_decay"
        )
        if not self.cell.option("use_orig_params"):
            # A flat parameter belongs to one group as a whole:
            # https://docs.pytorch.org/docs/stable/fsdp.html (use_orig_params).
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            return [{"params": trained, "weight_decay": decay}]
        # A public method, which is called as a function: it reads nothing of its ``self``. There is
        # no Trainer in the reference, so the driver is passed.
        decayed_names = set(Trainer.get_decay_parameter_names(self, model))
        decayed = []
        undecayed = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if name in decayed_names:
                decayed.append(parameter)
            else:
                undecayed.append(parameter)
        return [
            {"params": decayed, "weight_decay": decay},
            {"params": undecayed, "weight_decay": 0.0},
        ]

    def make_scheduler(self, optimizer: torch.optim.Optimizer, every: int = 1) -> Any:  # noqa: ARG002 - Trainer's is of steps
        """Return the schedule of the TrainingArguments for the reference, as Trainer makes it.

        ``every``, after how many calls the rate decays, is always 1 here: only the driver for
        accelerate passes another number.
        """
        from transformers import get_scheduler

        settings = SCHEDULE | self.cell.settings("TrainingArguments")
        # Before transformers 5 a fraction is an argument of its own, ``warmup_ratio``.
        warmup = settings.get("warmup_steps", 0) or settings.get("warmup_ratio", 0)
        if warmup < 1:
            # Since then ``warmup_steps`` below one is a fraction of all steps.
            warmup_steps = math.ceil(warmup * STEPS)
        else:
            warmup_steps = int(warmup)
        return get_scheduler(
            settings["lr_scheduler_type"],
            optimizer,
            num_warmup_steps=warmup_steps,
            num_training_steps=STEPS,
            scheduler_specific_kwargs=settings["lr_scheduler_kwargs"],
        )

    def optimizer_class(self) -> tuple[Any, dict[str, Any]] | None:
        """Return the class and the arguments of an optimizer that TrainingArguments cannot name.

        That is Muon, with AdamW beside it. None for all others, which Trainer makes itself. Trainer
        gets the result as ``optimizer_cls_and_kwargs``.
        """
        if self.cell.option("optimizer") != "muon":
            return None
        from pytest_distcompat.ext.upstream.drivers._joined import Joined

        # One optimizer object made of the two that ``make(param_groups)`` returns.
        return Joined, {"make": self.muon_and_adamw}

    def make_optimizer(self, model: Module) -> Any:
        """Return the reference's optimizer, made as Trainer makes it."""
        class_with_arguments = self.optimizer_class()
        if class_with_arguments is not None:
            optimizer_class, class_arguments = class_with_arguments
            return optimizer_class(self.groups(model), **class_arguments)
        own_name = OPTIMIZERS[str(self.cell.option("optimizer"))]
        name = self.setting_or_default(own_name, "TrainingArguments.optim")
        if name == "adafactor":
            from transformers.optimization import Adafactor

            return self.make_with_settings(
                Adafactor, self.groups(model), scale_parameter=False, relative_step=False
            )
        if name not in TORCH_OPTIMIZERS:
            # AdamW, perhaps in 8 bits: all drivers make it of ``groups``.
            return super().make_optimizer(model)
        from torch import optim

        torch_class = getattr(optim, TORCH_OPTIMIZERS[name])
        arguments = _parsed(self.optimizer_arguments or "")
        return self.make_with_settings(torch_class, self.groups(model), **arguments)

    @property
    def optimizer_arguments(self) -> str | None:
        """Return the optimizer's own arguments, such as ``momentum=0.9,nesterov=true``.

        TrainingArguments spell them so. None if there are none.
        """
        default = "momentum=0.9" if self.cell.option("optimizer") == "sgd" else None
        arguments: str | None = self.setting_or_default(default, "TrainingArguments.optim_args")
        return arguments

    def make_with_settings(self, optimizer_class: Any, groups: Any, **arguments: Any) -> Any:
        """Return an optimizer with the cell's numbers: learning rate, betas, epsilon.

        TrainingArguments or DeepSpeed's JSON may set them.

        Args:
            optimizer_class: Such as ``torch.optim.AdamW``.
            groups: Param groups.
            arguments: Further arguments of the optimizer.
        """
        rate = self.setting_or_default(
            LEARNING_RATE, "TrainingArguments.learning_rate", "ds_config.optimizer.params.lr"
        )
        numbers = {"lr": rate}
        if optimizer_class.__name__.startswith("AdamW"):
            beta1 = self.setting_or_default(0.9, "TrainingArguments.adam_beta1")
            beta2 = self.setting_or_default(0.999, "TrainingArguments.adam_beta2")
            numbers["betas"] = (beta1, beta2)
            numbers["eps"] = self.setting_or_default(
                1e-8, "TrainingArguments.adam_epsilon", "ds_config.optimizer.params.eps"
            )
        return super().make_with_settings(optimizer_class, groups, **arguments, **numbers)

    @property
    def averaged_over(self) -> str:
        """Return what has equal weight in the loss: ``token`` or ``rank``.

        It is ``rank`` where the cell has Trainer count the tokens of each rank alone.
        """
        across = self.setting_or_default(True, "TrainingArguments.average_tokens_across_devices")
        return self.mean if across else "rank"

    def reference_loss(self, model: Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss over the tokens of a micro-batch, with label smoothing if set."""
        smoothing = self.setting_or_default(0.0, "TrainingArguments.label_smoothing_factor")
        if not smoothing:
            return super().reference_loss(model, batch)
        from torch.nn import functional

        inputs = dict(batch)
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits
        # Each token but the last predicts the next one.
        logits = logits[:, :-1].float()
        return functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing
        )


def _parsed(optimizer_arguments: str) -> dict[str, Any]:
    """Return the values by name of ``optim_args``.

    ``momentum=0.9,nesterov=true`` becomes ``{"momentum": 0.9, "nesterov": True}``.
    """
    values = {}
    for argument in optimizer_arguments.split(","):
        if argument:
            name, text = argument.split("=")
            values[name] = json.loads(text)
    return values
