"""Model and data of the programs: a tiny Llama, and rows of consecutive numbers."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForTokenClassification, LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 64, 16


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )


def bert() -> BertForTokenClassification:
    """It declares its embeddings to be a block too, which accelerate's FSDP2 cannot wrap."""
    torch.manual_seed(0)
    return BertForTokenClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            num_labels=VOCABULARY,
        )
    )


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, rows: int = 64) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.rows = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=numbers)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}
