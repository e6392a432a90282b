"""transformers 5.23.0, accelerate 1.15.0: a checkpoint of FSDP1 with flat parameters cannot be resumed under FSDP2.

Expected: a run that resumes, as with ``use_orig_params=True``. Seen: FSDP1's flat optimizer is saved as one group, of Trainer's
two (with weight decay and without) the second one loses its settings: ``KeyError: 'betas'``. With an adapter the optimizer
stands under FSDP1's own names, which FSDP2 does not find: a CheckpointException.
"""

import os
import tempfile

os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29591"}
os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu"}

import torch
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
}


def train(place, steps, fsdp, wrap=lambda model: model, resumed=None, **more):
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    # accelerate takes FSDP for accelerators only; this has it on the CPU.
    PartialState().distributed_type = DistributedType.MULTI_GPU
    fsdp = {
        "cpu_ram_efficient_loading": False,
        "sync_module_states": False,
        "state_dict_type": "SHARDED_STATE_DICT",
        **fsdp,
    }
    fsdp |= {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    }
    steps = {
        "max_steps": steps,
        "save_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "optim": "adamw_torch",
    }
    steps["accelerator_config"] = {"use_configured_state": True}
    arguments = TrainingArguments(
        place,
        fsdp=True,
        fsdp_config=fsdp,
        dataloader_pin_memory=False,
        use_cpu=True,
        **steps,
        **more,
    )
    rows = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}] * 64
    model = wrap(LlamaForCausalLM(LlamaConfig(**SIZES)))
    Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=resumed)


def adapted(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


def rank(number, place):
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    found = []
    for nth, wrap in enumerate((lambda model: model, adapted)):
        try:
            train(f"{place}/{nth}", 1, {"version": 1, "use_orig_params": False}, wrap)
            train(f"{place}/{nth}", 2, {"version": 2}, wrap, resumed=f"{place}/{nth}/checkpoint-1")
        except BaseException as error:  # a CheckpointException is not an Exception
            found.append(f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
    if number == 0:
        print(*found, sep="\n")
        print("SEEN" if len(found) == 2 and "betas" in found[0] else "GONE", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(rank, (place,), 2)
