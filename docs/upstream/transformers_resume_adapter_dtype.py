"""transformers 5.23.0, peft 0.21.2: Trainer resumes a bfloat16 adapter in float32.

It loads the adapter with ``load_adapter``, which casts 16-bit adapters up unless it is told otherwise, whatever the adapter
was made in. Expected: bfloat16 before and after. Seen: float32 after, so that the run goes on in another precision.
"""

import os
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
}


def trained(place, steps, **resumed):
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    model = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj"]), autocast_adapter_dtype=False
    )
    arguments = TrainingArguments(
        place, max_steps=steps, save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True
    )
    rows = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}] * 16
    Trainer(model, arguments, train_dataset=rows).train(**resumed)
    return next(parameter.dtype for name, parameter in model.named_parameters() if "lora_A" in name)


with tempfile.TemporaryDirectory() as place:
    before = trained(place, 1)
    after = trained(place, 2, resume_from_checkpoint=f"{place}/checkpoint-1")
print("SEEN" if after != before else "GONE", f"{before} before, {after} after")
