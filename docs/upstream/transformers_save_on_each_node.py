"""transformers 5.23.0: ``save_pretrained(is_main_process=True)`` writes nothing on any rank but 0, from 5.15 on.

Trainer's ``save_on_each_node`` calls it so on the first rank of each node. Expected: files on each of them, as before. Seen: rank
1 writes no file and says nothing; on its node training cannot resume.
"""

import os
import tempfile
from pathlib import Path

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}

from torch import distributed, multiprocessing
from transformers import LlamaConfig, LlamaForCausalLM


def node(rank, place):
    """One rank, the first of a node with a directory of its own."""
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 8,
    }
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(f"{place}/{rank}", is_main_process=True)
    distributed.barrier()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        context = multiprocessing.get_context("spawn")
        nodes = [context.Process(target=node, args=(rank, place)) for rank in range(2)]
        for one in nodes:
            one.start()
        for one in nodes:
            one.join(100)
        found = [
            sorted(path.name for path in Path(place, str(rank)).glob("*")) for rank in range(2)
        ]
    print("SEEN" if found[0] and not found[1] else "GONE", f"the nodes have {found}")
