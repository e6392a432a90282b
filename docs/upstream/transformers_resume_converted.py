"""transformers 5.23.0: Trainer resumes without the weights that ``save_pretrained`` writes by other names than the model's own.

Checkpoints have the names of the Hub, such as those of single experts, since ``save_original_format=True`` is the default.
Trainer loads them by ``load_state_dict(strict=False)``, which knows the model's own names only, and logs what is missing.
Expected: the model goes on from the checkpoint. Seen: its experts are those that it was made with.
"""

import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments


def make(directory: str) -> Trainer:
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                           num_key_value_heads=2, num_local_experts=2)  # fmt: skip
    arguments = TrainingArguments(directory, max_steps=4, save_steps=2, learning_rate=0.1, use_cpu=True, report_to="none",
                                  disable_tqdm=True, save_total_limit=9)  # fmt: skip
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 32
    return Trainer(model=MixtralForCausalLM(config), args=arguments, train_dataset=rows)


with tempfile.TemporaryDirectory() as directory:
    whole = make(directory)
    whole.train()
    resumed = make(directory)
    resumed.train(resume_from_checkpoint=f"{directory}/checkpoint-2")
name = "model.layers.0.mlp.experts.down_proj"
off = (whole.model.get_parameter(name) - resumed.model.get_parameter(name)).abs().max().item()
print(
    "SEEN" if off > 1e-6 else "GONE",
    f"{name} is up to {off:.2g} off that of a training that never stopped",
)
