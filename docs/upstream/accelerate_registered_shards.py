"""accelerate 1.15.0: ``save_state`` writes registered objects on rank 0 alone, and all load them.

``save_custom_state`` calls ``save``, which writes on the main process only, into a file without the
rank in its name. So an average of weights that FSDP2 shards, as diffusers' ``EMAModel`` keeps one,
comes back with rank 0's shards on every rank: without a word where shards are alike in size. The
documentation of ``register_for_checkpointing`` says nothing of ranks.

Expected: each rank's own state. Seen: that of rank 0 on rank 1.
"""

import os
import tempfile

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


class Average:
    """An average of what this rank has of the weights; here only a copy."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def state_dict(self):
        return self.weights

    def load_state_dict(self, state):
        for name, weight in self.weights.items():
            weight.copy_(state[name])


def run(rank: int, place: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    os.environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_TORCH_DEVICE": "cpu"}
    # Without a GPU accelerate would run DDP instead.
    PartialState(cpu=True)
    PartialState().distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = torch.nn.Linear(4, 4)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    average = Average(model)
    accelerator.register_for_checkpointing(average)
    saved = average.weights["weight"].to_local().clone()
    accelerator.save_state(place)
    accelerator.load_state(place)
    loaded = average.weights["weight"].to_local()
    if rank == 1:
        same = torch.equal(saved, loaded)
        print("GONE" if same else "SEEN", f"rank 1 has its own shard after load_state: {same}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(run, (place,), nprocs=2)
