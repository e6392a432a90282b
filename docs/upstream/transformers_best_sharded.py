"""transformers 5.23.0: under FSDP with sharded state dicts Trainer does not find its best checkpoint, or some ranks do.

``torchrun --nproc-per-node 2 transformers_best_sharded.py``. ``Trainer._save_checkpoint`` looks for the checkpoint's directory
right after ``save_model``, which writes nothing while state dicts are sharded: accelerate makes the directory later. A rank that
looks later than another has made it finds it. Expected: the best checkpoint on all ranks. Seen: None on some or on all, so that
``load_best_model_at_end`` silently keeps the last weights, or hangs, since loading is collective.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import DistributedType, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
# On CPU ranks accelerate runs DDP instead of FSDP without this.
PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
)  # fmt: skip
tokens = torch.arange(16) % 32
rows = [{"input_ids": tokens, "labels": tokens} for _ in range(16)]
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
fsdp = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": False}  # fmt: skip
arguments = TrainingArguments(
    folder[0], max_steps=6, per_device_train_batch_size=1, use_cpu=True, report_to="none", disable_tqdm=True, fsdp=True,
    fsdp_config=fsdp, eval_strategy="steps", save_strategy="steps", eval_steps=2, save_steps=2, metric_for_best_model="loss",
    accelerator_config={"use_configured_state": True})  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:4])
trainer.train()
best = [None, None]
dist.all_gather_object(best, trainer.state.best_model_checkpoint)
if dist.get_rank() == 0:
    found = [path and Path(path).name for path in best]
    print(
        "GONE" if found == ["checkpoint-6"] * 2 else "SEEN",
        f"the ranks' best checkpoints are {found}",
    )
dist.destroy_process_group()
