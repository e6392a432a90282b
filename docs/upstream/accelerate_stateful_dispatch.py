"""accelerate 1.15.0, torchdata 0.11.0: with ``use_stateful_dataloader`` all ranks write their state to one file.

``save_state`` has each rank write ``dl_state_dict.bin``, and the last one stays. With ``dispatch_batches`` rank 0 alone reads the
data, so that the others have the state of a loader that never began. Here rank 1 writes last; otherwise it is a matter of chance.
Expected: a run that resumes goes on with the rows that it has not seen. Seen: it begins the epoch anew.
"""

import os
import tempfile

import torch
from accelerate import Accelerator, DataLoaderConfiguration


def prepared() -> tuple[Accelerator, object]:
    configuration = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    return accelerator, accelerator.prepare(torch.utils.data.DataLoader(range(16), batch_size=2))


def rank(number: int, directory: str) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29646", "OMP_NUM_THREADS": "1"}
    accelerator, loader = prepared()
    rows: list[list[int]] = []
    save = torch.save

    def save_in_turn(state: object, path: object, *rest: object, **settings: object) -> None:
        if "dl_state_dict" in str(path) and number == 1:
            torch.distributed.barrier()
        save(state, path, *rest, **settings)
        if "dl_state_dict" in str(path) and number == 0:
            torch.distributed.barrier()

    torch.save = save_in_turn
    for batch in loader:
        rows.append(batch.tolist())
        if len(rows) == 2:
            accelerator.save_state(directory)
    accelerator.wait_for_everyone()
    accelerator, loader = prepared()
    accelerator.load_state(directory)
    resumed = [batch.tolist() for batch in loader]
    if number == 0:
        print("SEEN" if resumed == rows else "GONE", f"{rows[2:]}; resumed {resumed}")
    accelerator.end_training()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (tempfile.mkdtemp(),), 2)
