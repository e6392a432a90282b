"""deepspeed 0.19.8: with ``partition_activations`` a recomputed function gets other arguments, where one is no tensor.

``deepspeed.checkpointing`` keeps each argument beside its size, and takes the flags of sizes out again, but of tensors alone
(``merge_tensors``). After an argument that is no tensor, such as a mask that is None, comes a further one. Expected: the
arguments of the first forward. Seen: others. A Llama's layers raise TypeError; a function that takes any is silently wrong.
"""

import os

import deepspeed
import torch

os.environ |= {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29567",
}
deepspeed.init_distributed("gloo")
given = []


def layer(hidden, *more):
    given.append(more)
    return hidden * 2


deepspeed.checkpointing.configure(None, partition_activations=True)
hidden = torch.ones(4, requires_grad=True)
deepspeed.checkpointing.checkpoint(layer, hidden, None, "causal").sum().backward()
torch.distributed.destroy_process_group()
first, again = given
print(
    "SEEN" if first != again else "GONE",
    f"the arguments beside the hidden states are {first} in the forward and {again} in the recomputation",
)
