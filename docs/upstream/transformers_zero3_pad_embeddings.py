"""transformers 5.23.0: under ZeRO-3 ``resize_token_embeddings(pad_to_multiple_of=...)`` removes all embeddings.

Without ``new_num_tokens`` it pads what there is, says the documentation. ``_get_resized_embeddings`` reads the number
of tokens from the partitioned weight, which has the shape (0,): the multiple of 0 is 0. With both arguments it works.
Expected: 64 tokens become 96. Seen: embeddings and head of no tokens, and a step that fails inside DeepSpeed
(``ds_shape: (0, 32)``). Near it: https://github.com/huggingface/transformers/pull/26024.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29642"}

import warnings

import deepspeed
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations import HfDeepSpeedConfig

warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")
zero = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
model = AutoModelForCausalLM.from_config(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
embeddings = model.resize_token_embeddings(pad_to_multiple_of=48)
print("transformers", transformers.__version__, "deepspeed", deepspeed.__version__)
with deepspeed.zero.GatheredParameters([embeddings.weight]):
    shape = tuple(embeddings.weight.shape)
if shape == (96, 32):
    print("GONE: 96 embeddings")
else:
    print(f"SEEN: embeddings of shape {shape}, and {model.config.vocab_size} tokens in the config")
