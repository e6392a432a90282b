"""Names of the parts of a checkpoint, and types for what readers of its formats return.

A checkpoint has parts: the model, the optimizer, the scheduler. Libraries give them other names:
the model is ``module`` in DeepSpeed's files and ``model_state_dict`` in torch's tutorials.
``files``, ``dcp`` and ``pickles`` find the parts by these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

#: The shape of each tensor, by key.
Shapes = dict[str, tuple[int, ...]]
#: A part of a checkpoint (``model``, ``optimizer`` or ``scheduler``), and its entries by key:
#: ``("model", {"lm_head.weight": tensor, ...})``.
Part = tuple[str, Mapping[str, Any]]


#: Names of the parts of a checkpoint in DeepSpeed, accelerate, torch's tutorials and Lightning.
MODEL = ("module", "model", "model_state_dict", "state_dict", "model_state")
OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state")
SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")
#: Each part with the names that libraries give it.
PARTS = {"model": MODEL, "optimizer": OPTIMIZER, "scheduler": SCHEDULER}


def is_state_dict(data: Mapping[Any, Any]) -> bool:
    """Tell whether a mapping is a model's state dict: it has tensors, and nothing else."""
    if not data:
        return False
    return all(isinstance(value, torch.Tensor) for value in data.values())
