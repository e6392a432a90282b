"""deepspeed 0.19.8: ``gradient_clipping`` clips Muon's update instead of its gradient under ZeRO.

Muon's update does not depend on the size of the gradient, so clipping changes it in no way without ZeRO. ZeRO puts the update in
the gradient's place and then clips. Expected: the same step at stage 0 and stage 1. Seen: at stage 1 all matrices together move
by the learning rate times ``gradient_clipping``, the less each the more there are.
"""

import os

import torch

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29568",
}
# Muon's functions are compiled; not here, where that would take minutes.
torch.compiler.set_stance("force_eager")
import deepspeed
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")


def moved(stage: int) -> float:
    """How far a step moves both matrices together, in learning rates."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.use_muon = True
    optimizer = MuonWithAuxAdam(
        [{"params": list(model.parameters()), "use_muon": True, "lr": 1e-3, "weight_decay": 0}]
    )
    zero = {"stage": stage, "reduce_scatter": False}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.randn(4, 8)).pow(2).mean())
    engine.step()
    return (
        sum(float((p - b).square().sum()) for p, b in zip(model.parameters(), before, strict=True))
        ** 0.5
        / 1e-3
    )


without, sharded = moved(0), moved(1)
print(
    "SEEN" if sharded < 0.9 * without else "GONE",
    f"moved by {without:.2f} at stage 0, {sharded:.2f} at stage 1",
)
torch.distributed.destroy_process_group()
