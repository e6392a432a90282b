"""Writes what a supervised fine-tuning needs into a directory: ``model``, a tiny Llama with its tokenizer, and ``data``."""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL, WORDS, ROWS, LENGTH = ("<pad>", "<eos>", "<unk>"), 60, 64, 32

where = Path(sys.argv[1])
numbers = random.Random(0)
(where / "data").mkdir(parents=True)
with (where / "data" / "train.jsonl").open("w", encoding="utf-8") as file:
    for _ in range(ROWS):
        text = " ".join(f"w{numbers.randrange(WORDS)}" for _ in range(LENGTH // 2))
        file.write(json.dumps({"text": text}) + "\n")

words = {word: number for number, word in enumerate((*SPECIAL, *(f"w{one}" for one in range(WORDS))))}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=LENGTH
).save_pretrained(where / "model")

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(words) + 1,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    pad_token_id=words["<pad>"],
    eos_token_id=words["<eos>"],
)
LlamaForCausalLM(config).save_pretrained(where / "model")
