"""transformers 5.23.0: with an optimizer in DeepSpeed's JSON Trainer decays biases and norms too.

Trainer's own optimizer has two groups, with and without ``weight_decay``. With ``"weight_decay": "auto"`` in the JSON all
parameters are in one group that decays: the same TrainingArguments train another model. Expected: the same groups. Seen: one.
"""

import os
import tempfile

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29614"}

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
parameters = {"torch_adam": True, "lr": "auto", "weight_decay": "auto"}
auto = dict.fromkeys(
    ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
config = {
    **auto,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": parameters},
}
sizes = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
}
row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
with tempfile.TemporaryDirectory() as place:
    settings = {
        "output_dir": place,
        "use_cpu": True,
        "max_steps": 1,
        "weight_decay": 0.1,
        "report_to": "none",
    }
    arguments = TrainingArguments(
        **settings, deepspeed=config, per_device_train_batch_size=1, save_strategy="no"
    )
    trainer = Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), arguments, train_dataset=[row])
    trainer.train()
found = [group["weight_decay"] for group in trainer.optimizer.param_groups]
print(
    "GONE" if 0.0 in found else "SEEN", f"weight_decay of the groups: {found}; expected [0.1, 0.0]"
)
