"""transformers 5.23.0: under ZeRO-3 ``from_pretrained`` raises for Pegasus, Marian, RoFormer and others.

After all weights are read, ``_initialize_missing_keys`` calls ``_init_weights`` for every module, and gathers only what
was missing. Some compute the shape of what they would draw before they look whether it is there, as of the sinusoidal
positions from ``self.weight.shape``; it is (0,) then. Expected: the model that one process reads. Seen: ``not enough
values to unpack``. Mended once in 2021: https://github.com/huggingface/transformers/issues/12403.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29644"}

import tempfile

import deepspeed
import transformers
from transformers import AutoModelForCausalLM, PegasusConfig
from transformers.integrations import HfDeepSpeedConfig

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")
config = PegasusConfig(
    vocab_size=64,
    d_model=32,
    decoder_layers=1,
    decoder_attention_heads=4,
    decoder_ffn_dim=64,
    max_position_embeddings=16,
)
with tempfile.TemporaryDirectory() as directory:
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    AutoModelForCausalLM.from_pretrained(directory)
    zero = HfDeepSpeedConfig(
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    )
    print("transformers", transformers.__version__, "deepspeed", deepspeed.__version__)
    try:
        AutoModelForCausalLM.from_pretrained(directory)
    except ValueError as error:
        print(f"SEEN: {error}")
    else:
        print("GONE: it is read")
