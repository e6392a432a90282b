"""transformers 5.23.0: Trainer cannot resume a DeepSeek-V4: it reads the checkpoint's config as that of no model.

``Trainer._load_from_checkpoint`` calls ``PreTrainedConfig.from_json_file`` to compare versions; the base class allows no layer
types but its own, and DeepSeek-V4 has ``hash_moe``. Expected: training goes on, as ``from_pretrained`` reads the same checkpoint.
Seen: ``mlp_layer_types`` entries must be in ('sparse', 'dense').
"""

import tempfile

from transformers import DeepseekV4Config, PreTrainedConfig

with tempfile.TemporaryDirectory() as directory:
    DeepseekV4Config().save_pretrained(directory)
    DeepseekV4Config.from_pretrained(directory)
    try:
        PreTrainedConfig.from_json_file(f"{directory}/config.json")
    except Exception as error:
        print("SEEN", " ".join(str(error).split()))
    else:
        print("GONE")
