"""transformers 5.23.0: under ZeRO-3 ``from_config`` leaves weights as they were in memory.

A model is then made without the constructors' initialization, and initialized by its ``_init_weights`` afterwards
(https://github.com/huggingface/transformers/pull/44236). What is drawn in a constructor alone, as the weights of
``Conv1D`` are, and is no case of the model's ``_init_weights``, is never drawn. Expected: weights of a standard
deviation of 0.02, as without ZeRO-3. Seen: whatever ``torch.empty`` found, here a number put there for the proof.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29641"}

import deepspeed
import torch
import transformers
from transformers import AutoModelForCausalLM, OpenAIGPTConfig
from transformers.integrations import HfDeepSpeedConfig

# The memory of torch.empty has this value.
torch.use_deterministic_algorithms(mode=True)
torch.utils.deterministic.fill_uninitialized_memory = True

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")
config = OpenAIGPTConfig(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=4)
whole = AutoModelForCausalLM.from_config(config).transformer.h[0].attn.c_attn.weight
zero = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
weight = AutoModelForCausalLM.from_config(config).transformer.h[0].attn.c_attn.weight
with deepspeed.zero.GatheredParameters([weight]):
    values = weight.detach().clone()
print("transformers", transformers.__version__, "deepspeed", deepspeed.__version__)
if values.std() < 0.04:
    print(f"GONE: a standard deviation of {values.std():.3f}")
else:
    print(
        f"SEEN: {int(values.isnan().sum())} of {values.numel()} elements were never drawn; their "
        f"standard deviation without ZeRO-3: {whole.std():.3f}"
    )
