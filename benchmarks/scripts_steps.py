"""What ``scripts_probe.py`` launches: accelerate's loop on a small Llama, which prints loss and seconds of each step."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, VOCABULARY = 64, 512


def main() -> None:
    """Train, on the same batches whoever watches."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    arguments = parser.parse_args()
    accelerator = Accelerator()
    torch.manual_seed(0)
    hidden = arguments.hidden
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    numbers = torch.Generator().manual_seed(1)
    rows = torch.randint(
        0, VOCABULARY, (8 * accelerator.num_processes * arguments.steps, LENGTH), generator=numbers
    )
    data: Any = torch.utils.data.DataLoader(rows, batch_size=8)  # type: ignore[arg-type]  # a tensor is a dataset
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    before = time.perf_counter()
    for step, batch in enumerate(data):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        said, now = float(loss), time.perf_counter()
        print(f"step {step} loss {said.hex()} seconds {now - before:.6f}", flush=True)
        before = now
    accelerator.end_training()


if __name__ == "__main__":
    main()
