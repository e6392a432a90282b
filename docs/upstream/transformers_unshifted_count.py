"""transformers 5.23.0: Trainer divides the loss of GPT-2 by too many tokens, since its class is not named ``...ForCausalLM``.

The first token of a row is never predicted, and Trainer leaves it out of ``num_items_in_batch`` where the model's
``loss_type`` is ForCausalLM (pull request 46204). Of GPT2LMHeadModel, whose loss is the same, ``loss_type`` is None. Expected:
the loss that the model computes by itself, as of LlamaForCausalLM. Seen: a smaller one, and smaller gradients.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=8,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
)
row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
with torch.no_grad():
    expected = model(**{name: value[None] for name, value in row.items()}).loss.item()
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        directory, max_steps=1, per_device_train_batch_size=2, logging_steps=1, save_strategy="no", use_cpu=True,
        report_to="none", disable_tqdm=True)  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=[row] * 2)
    trainer.train()
found = trainer.state.log_history[0]["loss"]
print(
    "SEEN" if abs(found - expected) > 0.01 else "GONE",
    f"Trainer's loss is {found:.4g}, the model's own {expected:.4g}",
)
