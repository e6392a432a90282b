"""Facts about torch and the GPUs as a line of JSON, for a parent that does not import torch."""

from __future__ import annotations

import json
from typing import Any


def infos() -> dict[str, Any]:
    """Return the versions of torch's libraries, or empty texts, and the names of usable GPUs."""
    import torch
    from torch import distributed

    gpus: list[str] = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            gpus.append(torch.cuda.get_device_name(number))
    has_nccl = distributed.is_available() and distributed.is_nccl_available()
    nccl_version = ""
    if has_nccl and torch.cuda.is_available():
        version: Any = torch.cuda.nccl.version
        nccl_version = ".".join(str(number) for number in version())
    return {
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "gpus": gpus,
        "nccl": nccl_version,
        "has_nccl": has_nccl,
        "gloo": distributed.is_available() and distributed.is_gloo_available(),
    }


if __name__ == "__main__":
    print(json.dumps(infos()))
