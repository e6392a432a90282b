"""DeepSpeed 0.19.8: ``deepspeed.zero.Init`` makes a model's float32 buffers in bfloat16, whatever dtype they ask for.

While a model is made, the constructors of tensors give every floating tensor the dtype of the parameters, also one with
``dtype=torch.float32``. What is loaded into such a buffer is rounded. Expected: buffers as without zero.Init, whose
engine leaves float32 buffers in float32 under ZeRO-3. Seen: bfloat16. So the biases that route tokens (``expert_bias``
of LFM2-MoE) are rounded by ``from_pretrained`` under ZeRO-3 alone. transformers guards ``torch.arange`` against it
(https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/deepspeed.py), for RoPE.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29646"}

import deepspeed
import torch


class Router(torch.nn.Module):
    """A layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("bias", torch.zeros(8, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the buffer."""
        return self.layer(x) + self.bias


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
}
with deepspeed.zero.Init(config_dict_or_path=config):
    inside = Router()
outside = Router()
deepspeed.zero.Init(module=outside, config_dict_or_path=config)
engine = deepspeed.initialize(model=outside, config=config)[0]
print("deepspeed", deepspeed.__version__)
kept = engine.module.bias.dtype
print("GONE" if inside.bias.dtype is kept else "SEEN", inside.bias.dtype, "instead of", kept)
