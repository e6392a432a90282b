"""TRL's SFTTrainer, unmodified: a ``transformers.Trainer``, so that only making it is another.

Needs ``pip install trl``, which brings ``datasets``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.drivers.trainer import TrainerDriver

if TYPE_CHECKING:
    from pytest_distcompat.driver import Plan

#: What SFTConfig turns on by itself: https://huggingface.co/docs/trl/sft_trainer#trl.SFTConfig.
DEFAULTS = {"bf16": False, "gradient_checkpointing": False}


class SFTDriver(TrainerDriver):
    """trl.SFTTrainer on the built-in tiny model, whose rows are tokens already."""

    name: ClassVar[str] = "sft"
    libraries: ClassVar[tuple[str, ...]] = (*TrainerDriver.libraries, "trl")

    def arguments(self, plan: Plan) -> dict[str, Any]:
        self.given = {**DEFAULTS, **super().arguments(plan)}
        return self.given

    def make_trainer(self, **settings: Any) -> Any:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        known = {field.name for field in dataclasses.fields(SFTConfig) if field.init}
        given = {name: value for name, value in self.given.items() if name in known}
        rows = [{name: value.tolist() for name, value in row.items()} for row in settings.pop("train_dataset")]
        settings |= {
            "args": SFTConfig(**given, max_length=None, dataset_kwargs={"skip_prepare_dataset": True}),
            "train_dataset": Dataset.from_list(rows).with_format("torch"),
            "processing_class": words(),
            "data_collator": together,
        }
        settings.pop("compute_loss_func")
        return SFTTrainer(**settings)


def words() -> Any:
    """A tokenizer, which SFTTrainer saves and asks for its padding."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokens = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")


def together(rows: Any) -> dict[str, Any]:
    """Rows of one length, none of them padded."""
    import torch
    from transformers import default_data_collator

    batch = default_data_collator(rows)
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
