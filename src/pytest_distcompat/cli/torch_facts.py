"""Facts about torch and the GPUs, printed as a line of JSON by a process that imports torch and starts CUDA."""

from __future__ import annotations

import json
from typing import Any


def infos() -> dict[str, Any]:
    """Return facts about torch: versions (empty where it was built without) and the names of the usable GPUs."""
    import torch
    from torch import distributed

    version: Any = torch.cuda.nccl.version
    usable = torch.cuda.is_available()
    has_nccl = distributed.is_available() and distributed.is_nccl_available()
    return {
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        if usable
        else [],
        "nccl": ".".join(map(str, version())) if has_nccl and usable else "",
        "has_nccl": has_nccl,
        "gloo": distributed.is_available() and distributed.is_gloo_available(),
    }


if __name__ == "__main__":
    print(json.dumps(infos()))
