"""transformers 5.23.0: Trainer saves the optimizer's state of rank 0 alone where a callback asks for a checkpoint.

For a model that was cut when it was loaded ``Trainer.__init__`` refuses to save what cannot be resumed, unless
``save_only_model=True`` or ``save_strategy="no"``. With the latter a callback can still set ``control.should_save``, as
documented. Expected: an error, or a checkpoint without optimizer. Seen: ``optimizer.pt`` with the part of rank 0 alone.
"""

import os
import tempfile
from pathlib import Path

import torch
from accelerate import DistributedType, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig


class Saving(TrainerCallback):
    def on_step_end(self, _args, _state, control, **_):
        control.should_save = True


def rank(number: int, directory: str) -> None:
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "2",
        "ACCELERATE_TORCH_DEVICE": "cpu",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29622"}
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    whole = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))
    whole.save_pretrained(f"{directory}/whole{number}")
    # Without a GPU accelerate refuses the mesh of tensor parallelism.
    PartialState(cpu=True)
    PartialState().distributed_type = DistributedType.MULTI_GPU
    config = DistributedConfig(tp_size=2)
    model = LlamaForCausalLM.from_pretrained(
        f"{directory}/whole{number}", distributed_config=config
    )
    rows = [
        {"input_ids": torch.tensor([row, 1, 2]), "labels": torch.tensor([row, 1, 2])}
        for row in range(8)
    ]
    arguments = TrainingArguments(
        output_dir=directory,
        use_cpu=True,
        max_steps=1,
        per_device_train_batch_size=1,
        report_to="none",
        save_strategy="no",
        accelerator_config={"use_configured_state": True},
    )
    try:
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Saving()]).train()
    except Exception as error:
        print("GONE", number, type(error).__name__, error)
        return
    path = f"{directory}/checkpoint-1/optimizer.pt"
    if number == 0:
        saved = torch.load(path, weights_only=False)["state"] if Path(path).exists() else {}
        held = [one["exp_avg"] for one in saved.values() if hasattr(one["exp_avg"], "placements")]
        part = sum(one.to_local().numel() < one.numel() for one in held)
        print("SEEN" if part else "GONE", f"{part} of {len(saved)} states are parts of rank 0")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (tempfile.mkdtemp(),), 2)
