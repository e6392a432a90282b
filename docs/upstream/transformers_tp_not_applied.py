"""transformers 5.23.0, accelerate 1.15.0: tensor parallelism that a whole model was asked for under FSDP2 is not applied.

``TrainingArguments(parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=2))`` with a model that was not cut when it was
loaded. Under DDP accelerate raises; under FSDP2 it warns that it skips the preparation, and that the warning can be ignored.
Expected: an error there too. Seen: training without tensor parallelism, in which two ranks each are fed the same rows.
"""

import os
import tempfile

import torch
from accelerate import DistributedType, ParallelismConfig, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Recording(Trainer):
    def training_step(self, model, inputs, *more):
        self.fed = inputs["input_ids"].tolist()
        return super().training_step(model, inputs, *more)


def rank(number: int) -> None:
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "4",
        "ACCELERATE_TORCH_DEVICE": "cpu",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29621"}
    # Without a GPU accelerate would run DDP instead.
    PartialState(cpu=True)
    PartialState().distributed_type = DistributedType.MULTI_GPU
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))
    rows = [
        {"input_ids": torch.tensor([row, 1, 2]), "labels": torch.tensor([row, 1, 2])}
        for row in range(8)
    ]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=1,
        per_device_train_batch_size=1,
        report_to="none",
        save_strategy="no",
        accelerator_config={"use_configured_state": True},
        fsdp=True,
        fsdp_config={"version": 2, "cpu_ram_efficient_loading": False},
        parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=2),
    )
    try:
        trainer = Recording(model=model, args=arguments, train_dataset=rows)
        trainer.train()
    except Exception as error:
        print("GONE", number, error)
        return
    fed: list = [None] * 4
    torch.distributed.all_gather_object(fed, trainer.fed)
    meshes = {parameter.device_mesh.mesh_dim_names for parameter in trainer.model.parameters()}
    if number == 0:
        print(
            "SEEN" if not any("tp" in names for names in meshes) else "GONE",
            "meshes",
            meshes,
            "rows",
            fed,
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 4)
