"""DeepSpeed 0.19.8: after the load of a universal checkpoint into ZeRO-3 the optimizer's ``step`` stays on the CPU.

``load_hp_checkpoint_state_from_checkpoint_dir_stage3`` copies moments to the parameter's device and takes ``step`` as the
converter wrote it, which reads all onto the CPU. Expected: the parameter's device, where torch's own ``load_state_dict`` puts
the step of a fused optimizer. Seen: the CPU. On a GPU AdamW with ``fused=True`` then refuses its next step: ``Expected all
tensors to be on the same device, but got state_steps is on cpu``. Needs no GPU: the
masters that are loaded into have device ``meta``. ZeRO-1 and 2 set it in ``load_hp_checkpoint_state_from_checkpoint_dir``
(runtime/base_optimizer.py) as it was read, too: seen with ZeRO-1 at two to four ranks on one H100.
"""

import contextlib
import os
import tempfile
from argparse import Namespace

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29632"}

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

model = torch.nn.Linear(8, 8)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
fused = torch.optim.AdamW(model.parameters(), fused=True)
engine = deepspeed.initialize(model=model, optimizer=fused, config=config)[0]
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
with tempfile.TemporaryDirectory() as place:
    engine.save_checkpoint(place, tag="a")
    main(
        Namespace(
            input_folder=f"{place}/a",
            output_folder=f"{place}/b",
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    zero = engine.optimizer
    zero.fp32_partitioned_groups_flat = [
        flat.to("meta") for flat in zero.fp32_partitioned_groups_flat
    ]
    with contextlib.suppress(
        NotImplementedError
    ):  # it copies the masters into the model next, of which meta has no values
        zero.load_hp_checkpoint_state_from_checkpoint_dir_stage3(f"{place}/b")

state = zero.optimizer.state[zero.fp32_partitioned_groups_flat[0]]
found = {key: value.device.type for key, value in state.items()}
print("SEEN" if found["step"] != found["exp_avg"] else "GONE", f"devices after the load: {found}")
