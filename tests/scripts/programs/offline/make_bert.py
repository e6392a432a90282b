"""Write a tiny BERT and its tokenizer into the directory of the first argument."""

import sys

import torch
from datasets import WORDS  # the one beside this script
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *(f"w{index}" for index in range(WORDS))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(sys.argv[1])
torch.manual_seed(0)
config = BertConfig(
    vocab_size=len(words),
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=32,
)
BertForSequenceClassification(config).save_pretrained(sys.argv[1])
