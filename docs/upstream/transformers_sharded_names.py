"""transformers 5.23.0: ``save_pretrained`` of a model under FSDP2 writes other names than of the same model without it.

Rules for names are looked up by the class names of modules, and ``fully_shard`` gives modules classes of its own. Trainer's
``save_model`` writes files so. Expected: the names of the model before it was sharded, which are those of the Hub. Seen: others.
``from_pretrained`` still reads those of Gemma 3, but not all of a DeepSeek-V4.
"""

import os
import tempfile

import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.fsdp import fully_shard
from transformers import Gemma3Config, Gemma3ForConditionalGeneration


def names(model) -> set[str]:
    state = {
        name: getattr(value, "full_tensor", lambda v=value: v)()
        for name, value in model.state_dict().items()
    }
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, state_dict=state)
        with safe_open(f"{directory}/model.safetensors", "pt") as file:
            return set(file.keys())


os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29566"}
dist.init_process_group("gloo")
text = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
          "patch_size": 14}  # fmt: skip
model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision))
expected = names(model)
fully_shard(
    model.model.language_model.layers[0], mesh=dist.device_mesh.init_device_mesh("cpu", (1,))
)
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
found = names(model)
dist.destroy_process_group()
wrong, right = sorted(found - expected), sorted(expected - found)
print(
    "SEEN" if wrong else "GONE",
    f"{len(wrong)} of {len(found)} names are other ones, as {wrong[:1]}; expected {right[:1]}",
)
