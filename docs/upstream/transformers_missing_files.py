"""transformers 5.23.0: Trainer resumes from a checkpoint without its optimizer or random state, and raises no error.

Expected: an error that names the file, as for the weights. Seen: training goes on with a fresh optimizer without a word, and
with other random numbers, of which only the log tells.
"""

import os
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
}


def train(place, steps, **resumed):
    arguments = TrainingArguments(
        place, max_steps=steps, save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True
    )
    rows = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}] * 16
    Trainer(LlamaForCausalLM(LlamaConfig(**SIZES)), arguments, train_dataset=rows).train(**resumed)


silent = []
for name in ("optimizer.pt", "rng_state.pth"):
    with tempfile.TemporaryDirectory() as place:
        train(place, 1)
        Path(place, "checkpoint-1", name).unlink()
        try:
            train(place, 2, resume_from_checkpoint=f"{place}/checkpoint-1")
            silent.append(name)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
print("SEEN" if len(silent) == 2 else "GONE", f"resumed without an error though gone: {silent}")
