"""transformers 5.23.0: under ZeRO-3 ``from_pretrained`` does not know ``ignore_mismatched_sizes=True``.

Rank 0 copies what was read into each parameter, and its error of a size raises, whatever the argument says; the other
ranks get no error and wait for rank 0, until the launcher ends them. The message advises the argument that was given.
Expected: as without ZeRO-3, what has another size is drawn anew. Near it:
https://github.com/huggingface/transformers/issues/17336 (2022, where other weights were drawn anew too).
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29643"}

import tempfile

import deepspeed
import transformers
from transformers import AutoModelForSequenceClassification, LlamaConfig
from transformers.integrations import HfDeepSpeedConfig

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_labels=3,
)


def load() -> str:
    """Load a classifier of three classes as one of five, and return the error."""
    try:
        AutoModelForSequenceClassification.from_pretrained(
            directory, num_labels=5, ignore_mismatched_sizes=True
        )
    except RuntimeError as error:
        return str(error)
    return ""


with tempfile.TemporaryDirectory() as directory:
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    assert not load()
    zero = HfDeepSpeedConfig(
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    )
    message = load()
print("transformers", transformers.__version__, "deepspeed", deepspeed.__version__)
print(f"SEEN: {message}" if message else "GONE: the head is drawn anew")
