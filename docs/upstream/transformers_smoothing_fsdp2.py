"""transformers 5.23.0: under FSDP2 Trainer smooths labels that are not shifted: each token is to predict itself.

``compute_loss`` shifts labels where the class of the unwrapped model is that of a causal language model, by its name.
``fully_shard`` makes the model an instance of a new class, ``FSDPLlamaForCausalLM``, and unwrapping does not undo that.
Expected: the loss of before. Seen: another one, of another task.
"""

import os
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29583"}

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=16,
    )
)
tokens = torch.arange(8)[None]
with tempfile.TemporaryDirectory() as place:
    arguments = TrainingArguments(place, use_cpu=True, report_to=[], label_smoothing_factor=0.1)
    trainer = Trainer(model, arguments)
    before = float(trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens}))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    after = float(trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens}))
    torch.distributed.destroy_process_group()
print("GONE" if abs(after - before) < 1e-4 else "SEEN", f"loss {before:.4f}, sharded {after:.4f}")
