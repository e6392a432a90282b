"""accelerate 1.15.0, transformers 5.23.0: tensor parallelism beside FSDP2 cannot be prepared.

``Accelerator._prepare_tp`` makes DTensors of what the plan has left whole. For that it imports ``ReplicateParallel`` from
``transformers.integrations.tensor_parallel``, which has no such class any more, whatever the model. Expected: a model on the
mesh (dp_shard, tp). Seen: ``ImportError: cannot import name 'ReplicateParallel'``.
"""

import os

import torch
from accelerate import (
    Accelerator,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def rank(number: int) -> None:
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "4",
        "ACCELERATE_TORCH_DEVICE": "cpu",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}
    # Without a GPU accelerate would run DDP instead.
    PartialState(cpu=True)
    PartialState().distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    sizes = ParallelismConfig(dp_shard_size=2, tp_size=2)
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=sizes)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
    parallelize_module(
        model, accelerator.torch_device_mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}
    )
    try:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        found = "prepared"
    except ImportError as error:
        found = str(error)
    if number == 0:
        print("SEEN" if "ReplicateParallel" in found else "GONE", found)
    accelerator.end_training()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 4)
