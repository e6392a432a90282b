"""transformers 5.23.0: under FSDP with sharded state dicts Trainer does not find its best checkpoint, or some ranks do.

``Trainer._save_checkpoint`` looks for the checkpoint's directory right after ``save_model``, which writes nothing while state
dicts are sharded: accelerate makes the directory later. A rank that looks later than another has made it finds it. Expected: the
best checkpoint on all ranks. Seen: None on some or on all, so that ``load_best_model_at_end`` silently keeps the last weights,
or hangs, since loading is collective.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import DistributedType, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def rank(number: int, directory: str) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29673"}
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    # On CPU ranks accelerate runs DDP instead of FSDP without this.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, num_hidden_layers=1, num_attention_heads=2, **sizes)
    )
    tokens = torch.arange(16) % 32
    rows = [{"input_ids": tokens, "labels": tokens} for _ in range(16)]
    fsdp = {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": False,
    }
    arguments = TrainingArguments(
        directory,
        max_steps=6,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        fsdp=True,
        fsdp_config=fsdp,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=2,
        save_steps=2,
        metric_for_best_model="loss",
        accelerator_config={"use_configured_state": True},
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train()
    best = [None, None]
    dist.all_gather_object(best, trainer.state.best_model_checkpoint)
    if number == 0:
        names = [path and Path(path).name for path in best]
        print(
            "GONE" if names == ["checkpoint-6"] * 2 else "SEEN",
            f"the ranks' best checkpoints are {names}",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(rank, (directory,), 2)
