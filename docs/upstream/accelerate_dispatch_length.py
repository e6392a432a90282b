"""accelerate 1.15.0: the length of a loader with ``dispatch_batches`` under tensor parallelism is that of data parallelism.

Beside tensor parallelism each rank is given each batch, and ``DataLoaderDispatcher.__len__`` still divides their number by that of
all ranks. ``transformers.Trainer`` (5.23.0) ends an epoch after so many batches, so that half of the rows are never trained on.
Expected: as many batches as the loader gives. Seen: half of them.
"""

import os

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.state import PartialState
from torch.distributed.device_mesh import init_device_mesh


def rank(number: int) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29643"}
    PartialState(cpu=True)
    loader = prepare_data_loader(
        torch.utils.data.DataLoader(range(8), batch_size=2),
        device=torch.device("cpu"),
        put_on_device=True,
        dispatch_batches=True,
        torch_device_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)),
    )
    length, given = len(loader), len(list(loader))
    if number == 0:
        print("SEEN" if length == given // 2 else "GONE", f"length {length}, {given} batches")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
