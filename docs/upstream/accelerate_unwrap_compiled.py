"""accelerate 1.15.0: ``unwrap_model`` of a compiled model takes the wrapper off the model that is trained, for good.

With ``keep_torch_compile=True``, the default, ``extract_model_from_parallel`` returns the compiled model itself after it has put
the bare module into its ``_orig_mod``. ``save_model`` and ``get_state_dict`` do it too. Afterwards the prepared model has no
``no_sync``, other parameter names, and under FSDP1 no ``clip_grad_norm_`` of its own. Expected: the prepared model is left alone.
Seen: after ``save_model`` it has neither ``no_sync`` nor the names that it had.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin


def rank(number: int) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29604"}
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    before, could = next(iter(model.state_dict())), hasattr(model, "no_sync")
    accelerator.unwrap_model(model)
    after, can = next(iter(model.state_dict())), hasattr(model, "no_sync")
    if number == 0:
        print(
            "SEEN" if before != after else "GONE",
            f"{before} became {after}, no_sync: {could} became {can}",
        )
    accelerator.end_training()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
