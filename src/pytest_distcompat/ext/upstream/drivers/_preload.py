"""Modules that the fork server imports for each library, so that ranks need not.

A fork server is a process from which the ranks of a run are forked: what it has imported, they
have at once, which saves each rank seconds. A driver, the class by which a library is tested, names
one of these tuples as its ``preload``. Modules that a release lacks are skipped.
"""

from __future__ import annotations

#: For the driver of plain torch; the others import it too.
TORCH = (
    # Every optimizer imports it when it is created.
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.tensor",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.nn.parallel",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "numpy.ctypeslib",
    "safetensors.torch",
)
DEEPSPEED = (
    *TORCH,
    "deepspeed",
    "deepspeed.utils.zero_to_fp32",
    # Every ZeRO engine imports it.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.module_inject.auto_ep_presets.registry",
    "deepspeed.comm.mori",
    "deepspeed.checkpoint",
)
ACCELERATE = ("accelerate", "accelerate.utils.fsdp_utils", *DEEPSPEED)
TRAINER = ("transformers.trainer", "transformers.integrations.deepspeed", *ACCELERATE)
