"""accelerate 1.15.0, deepspeed 0.19.8: of a model under ZeRO-3 in one process on CPU ``save_model`` writes one parameter.

All are parts of one flat buffer there, and ``_zero3_consolidated_16bit_state_dict`` returns them with ``.detach().cpu()``, which
copies nothing on CPU. accelerate takes tensors of one buffer for one weight under several names, and drops all but the first,
with a warning. On a GPU, and on several ranks, they are copies. Expected: a file with all parameters. Seen: one of them.
"""

import os
import tempfile

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29678",
    "DS_ACCELERATOR": "cpu",
}

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from safetensors.torch import load_file

config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
with tempfile.TemporaryDirectory() as directory:
    accelerator.save_model(model, directory)
    names = sorted(load_file(f"{directory}/model.safetensors"))
print("SEEN" if len(names) < 4 else "GONE", f"saved of 4 parameters: {', '.join(names)}")
