"""transformers 5.23.0: under DeepSpeed a Trainer trains once; a second ``train()`` raises AttributeError.

``train()`` begins with ``accelerator.free_memory()``, which destroys the engine of the training before. Trainer keeps it as
``model_wrapped``, takes it for a model that is wrapped already, and does not prepare it again: accelerate has no engine then.
The same call with ``resume_from_checkpoint`` ends so, too. Expected: the second training runs, as under DDP and FSDP. Seen:
``'NoneType' object has no attribute 'backward'``. Setting ``trainer.model_wrapped = trainer.model`` before it helps.
"""

import os
import tempfile

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
config = {
    **dict.fromkeys(names, "auto"),
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
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
    settings = {"output_dir": place, "use_cpu": True, "max_steps": 2, "report_to": "none"}
    arguments = TrainingArguments(
        **settings, deepspeed=config, per_device_train_batch_size=1, save_strategy="no"
    )
    trainer = Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), arguments, train_dataset=[row])
    trainer.train()
    try:
        trainer.train()
    except AttributeError as error:
        print("SEEN", f"the second train() raises AttributeError: {error}")
    else:
        print("GONE", f"the second train() took {trainer.state.global_step} steps")
