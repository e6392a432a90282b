"""Facts about torch and the GPUs as a line of JSON, for a parent that does not import torch.

``distcompat doctor`` runs ``python -m pytest_distcompat.cli.torch_facts`` in a process of its own
(``cli.machine.torch_infos``) and reads the last line of its output, for example::

    {"cuda": "12.8", "hip": "", "gpus": ["NVIDIA H100"], "nccl": "2.27.3", "has_nccl": true, ...}
"""

from __future__ import annotations

import json
from typing import Any


def infos() -> dict[str, Any]:
    """Return what this torch is built for and which GPUs it can use.

    Returns:
        ``cuda`` and ``hip``: the version for which torch is built; empty if it is not. ``gpus``:
        the names of the GPUs that it can use. ``nccl``: the version of NCCL; empty without GPUs.
        ``has_nccl`` and ``gloo``: whether process groups can use these backends.
    """
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
