"""transformers 5.23.0: under ZeRO-3 ``from_pretrained`` does not load the extra state of modules.

``_load_state_dict_into_zero3_model`` copies parameters and buffers, and never calls ``Module.set_extra_state``, which
``from_pretrained`` calls elsewhere. Expected: the number in the files. Seen: that of a new model, with a warning that it is not
in the files; the model computes something else.

https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html (set_extra_state)
"""

import os
import tempfile

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29677", "HF_HUB_OFFLINE": "1"}

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")


class Scaled(torch.nn.Module):
    """A number in the state dict that is neither a parameter nor a buffer."""

    scale = 1.0

    def get_extra_state(self):
        return torch.tensor([self.scale])

    def set_extra_state(self, state):
        self.scale = float(state)


class ScaledLlama(LlamaForCausalLM):
    """A Llama with extra state."""

    def __init__(self, config):
        super().__init__(config)
        self.scaled = Scaled()


sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
model = ScaledLlama(LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **sizes))
model.scaled.scale = 2.0
with tempfile.TemporaryDirectory() as place:
    model.save_pretrained(place)
    usual = ScaledLlama.from_pretrained(place).scaled.scale
    # While it exists, from_pretrained partitions what it loads.
    config = HfDeepSpeedConfig(
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    )
    partitioned = ScaledLlama.from_pretrained(place).scaled.scale
print(
    "SEEN" if partitioned != usual else "GONE",
    f"the number is {usual} after a usual load, {partitioned} under ZeRO-3; 2.0 is in the files",
)
