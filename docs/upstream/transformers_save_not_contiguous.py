"""transformers 5.23.0: Trainer cannot save a model of torch alone with a parameter that is not contiguous.

``_save`` hands the state dict of a plain ``torch.nn.Module`` to ``safetensors.torch.save_file`` as it
is; ``save_pretrained`` makes tensors contiguous. Expected: a checkpoint. Seen: ValueError (You are
trying to save a non contiguous tensor) at the first save of the training.
"""

import tempfile

import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    """A layer whose weight was loaded transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 2).t())

    def forward(self, x):
        return {"loss": torch.nn.functional.linear(x, self.weight).square().mean()}


with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(directory, use_cpu=True, report_to=[])
    try:
        Trainer(Model(), arguments).save_model()
    except ValueError as error:
        print("SEEN", str(error).split(".")[0])
    else:
        print("GONE it is saved")
