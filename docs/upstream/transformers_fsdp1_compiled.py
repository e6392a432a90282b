"""transformers 5.23.0, accelerate 1.15.0: Trainer with FSDP1 and torch_compile cannot use its own checkpoints.

Expected: the model's own names in the files, and a run that resumes. Seen: names with ``_orig_mod.``, and a resumed run that
fails: "Size mismatch between saved ... and current" or, with whole state dicts, "`_is_root` should not have been set
yet". With ``use_orig_params=False`` the save itself fails.
"""

import os
import tempfile

os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29590"}
os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu"}

import torch
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState
from torch.distributed.checkpoint import FileSystemReader
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


def tried(*arguments, **named):
    try:
        train(*arguments, torch_compile=True, torch_compile_backend="eager", **named)
    except BaseException as error:  # a CheckpointException is not an Exception
        return str(error).strip().splitlines()[-1]
    return ""


def rank(number, place):
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    first = tried(f"{place}/one", 1, {"version": 1, "use_orig_params": True})
    resumed = tried(
        f"{place}/one",
        2,
        {"version": 1, "use_orig_params": True},
        resumed=f"{place}/one/checkpoint-1",
    )
    flat = tried(f"{place}/flat", 1, {"version": 1, "use_orig_params": False})
    if number == 0:
        names = (
            FileSystemReader(f"{place}/one/checkpoint-1/pytorch_model_fsdp_0")
            .read_metadata()
            .state_dict_metadata
        )
        print(
            "names:",
            sorted(names)[:2],
            "first:",
            first,
            "resumed:",
            resumed,
            "flat:",
            flat,
            sep="\n",
        )
        print(
            "SEEN" if any("_orig_mod" in name for name in names) and resumed and flat else "GONE",
            flush=True,
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(rank, (place,), 2)
