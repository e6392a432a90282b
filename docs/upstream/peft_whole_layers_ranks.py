"""peft 0.21.2: `save_pretrained` raises KeyError on a rank without weights, if a layer is trained whole beside the adapter.

Under FSDP ``Accelerator.get_state_dict`` returns an empty dict on all ranks but the first, and each rank passes what it gets
on. Of an adapter PEFT picks the keys that are there; of ``modules_to_save`` it asks for each. Expected: nothing is written.
Seen: ``KeyError: 'modules_to_save.default.weight'``, while the first rank writes its file.
"""

import os
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from peft import LoraConfig, get_peft_model


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.adapted = torch.nn.Linear(4, 4)
        self.whole = torch.nn.Linear(4, 4)


def save(**settings):
    model = get_peft_model(Model(), LoraConfig(r=2, target_modules=["adapted"], **settings))
    with tempfile.TemporaryDirectory() as place:
        try:
            model.save_pretrained(place, state_dict={}, is_main_process=False)
        except KeyError as error:
            return f"KeyError: {error}"
    return "nothing"


found = save(modules_to_save=["whole"])
print("SEEN" if "KeyError" in found else "GONE", f"{found}; {save()} of an adapter alone")
