"""transformers 5.23.0: ``Trainer.evaluate`` during training changes what is trained after it, where the model has dropout.

The iterator of the evaluation loader draws its base seed from torch's global generator
(``torch.utils.data.dataloader._BaseDataLoaderIter``), which the next dropout mask is drawn from. Expected: the same weights with
and without evaluation. Seen: other weights, on one process and on any strategy.
"""

import tempfile

import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout, self.linear = torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)

    def forward(self, x, labels=None):
        found = self.linear(self.dropout(x))
        return {"loss": (found - labels).square().mean(), "logits": found}


def train(strategy: str) -> list[float]:
    torch.manual_seed(0)
    rows = [{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(8)]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory, max_steps=4, per_device_train_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True,
            save_strategy="no", eval_strategy=strategy, eval_steps=1, seed=0)  # fmt: skip
        trainer = Trainer(model=Model(), args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        return trainer.model.linear.weight.flatten().tolist()


with_evaluation, without = train("steps"), train("no")
off = max(abs(a - b) for a, b in zip(with_evaluation, without, strict=True))
print(
    "SEEN" if off > 1e-6 else "GONE",
    f"weights are up to {off:.2g} off those that are trained without evaluation",
)
