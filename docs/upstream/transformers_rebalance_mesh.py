"""transformers 5.23.0: ``train_sampling_strategy="batch_rebalance"`` gives the ranks of one tensor parallel model other rows.

The sampler deals rows out to ``args.world_size`` ranks, and Trainer has no loader shard them again. Expected: the same batch on
the ranks that compute it together, as with the other strategies. Seen: other batches, even of another size, so that the
training ends in an error of a collective, or computes nonsense.
"""

import os
import tempfile

import torch
from accelerate import DistributedType, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig


def rank(number: int, directory: str) -> None:
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "2",
        "ACCELERATE_TORCH_DEVICE": "cpu",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29644"}
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    whole = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))
    whole.save_pretrained(f"{directory}/whole{number}")
    # Without a GPU accelerate refuses the mesh of tensor parallelism.
    PartialState(cpu=True)
    PartialState().distributed_type = DistributedType.MULTI_GPU
    model = LlamaForCausalLM.from_pretrained(
        f"{directory}/whole{number}", distributed_config=DistributedConfig(tp_size=2)
    )
    rows = [{"input_ids": torch.tensor([row, 1, 2])} for row in range(8)]
    arguments = TrainingArguments(
        output_dir=directory,
        use_cpu=True,
        max_steps=1,
        per_device_train_batch_size=2,
        train_sampling_strategy="batch_rebalance",
        report_to="none",
        save_strategy="no",
        accelerator_config={"use_configured_state": True},
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    batch = next(iter(trainer.get_train_dataloader()))["input_ids"][:, 0].tolist()
    batches: list[list[int]] = [[], []]
    torch.distributed.all_gather_object(batches, batch)
    if number == 0:
        print("SEEN" if batches[0] != batches[1] else "GONE", f"rows of the ranks: {batches}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (tempfile.mkdtemp(),), 2)
